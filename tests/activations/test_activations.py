"""Partitioned and offloaded activation checkpoints. Oracles: plain PyTorch in one process, its own checkpoint, shapes.

Bytes and traffic are closed forms: ZeRO §6.1 and §8 (P_a), s·h elements for each block and sample.
"""

from __future__ import annotations

import gc
import resource
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.activations import Activations, checkpoint
from onecopy.errors import OffloadError, SettingsError, UsageError
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter
from oracle import OPTIMIZERS, Run, assert_trains_like_twin, part, train, train_twin
from ranks import run_ranks
from tensor_parallel_models import DIM, HEADS, Gpt, full_weights, mesh_of, parallelize

ROWS, LENGTH, LAYERS = 12, 8, 2
OFFLOADS = ["none", "cpu", "files"]


def _offload(name: str, folder: Path) -> Any:
    return {"none": None, "cpu": "cpu", "files": folder / "activations"}[name]


def _tensor_mesh(ranks: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


# --- one region


def _dropped(x: Tensor, weight: Tensor, *, scale: float, seen: list[Tensor]) -> dict[str, Any]:
    y = F.dropout(x @ weight, 0.5)
    seen.append(y.detach().clone())
    return {"out": (y.sin() * scale, None), "text": "as it is"}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@one_fork
def test_a_function_is_computed_again_with_the_same_masks(ranks: int, offload: str, tmp_path: Path) -> Forked:
    """Keyword, nested and other arguments go through; gradients equal those of the function itself, bit for bit."""

    def gradients(call: Callable[..., dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(3)
        x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(7, 7, requires_grad=True)
        seen: list[Tensor] = []
        # Not the leaves themselves: a checkpoint keeps what other functions have computed.
        result = call(x * 1, weight=weight * 1, scale=2.0, seen=seen)
        assert result["text"] == "as it is"
        result["out"][0].sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad], seen

    def run(rank: int) -> None:
        expected, _ = gradients(_dropped)
        mesh = _tensor_mesh(ranks) if ranks > 1 else None
        found, seen = gradients(checkpoint(_dropped, mesh, offload=_offload(offload, tmp_path)))
        assert len(seen) == 2, "computed in forward and again in backward"
        assert torch.equal(seen[0], seen[1])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    yield On(ranks, run)
    assert list(tmp_path.rglob("*.bin")) == []


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@one_fork
def test_what_is_kept_is_the_input_divided_by_the_ranks(ranks: int, offload: str, tmp_path: Path) -> Forked:
    """Oracle: shapes. 6·8 fp32 elements over 1, 2 or 4 ranks; none on the device when it is offloaded."""

    def run(rank: int) -> None:
        ledger = Ledger()
        meter = Meter(ledger)
        mesh = _tensor_mesh(ranks) if ranks > 1 else None
        block = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        block = checkpoint(seeded(lambda: block), mesh, offload=_offload(offload, tmp_path), ledger=ledger, meter=meter)
        x = torch.arange(48.0).view(6, 8).requires_grad_() * 0.01
        y = block(x)
        kept = 6 * 8 * 4 // ranks
        assert meter.live["checkpoints"] == (kept if offload == "none" else 0)
        assert meter.off_device.get("checkpoints", 0) == (0 if offload == "none" else kept)
        assert sum(e.bytes_sent for e in ledger.total.entries if e.op == "activations") == 0
        y.sum().backward()
        assert ledger.total.bytes_sent("activations", axis="tensor") == kept * (ranks - 1)
        del y
        gc.collect()
        assert meter.live["checkpoints"] == meter.off_device.get("checkpoints", 0) == 0

    yield On(ranks, run)


@pytest.mark.parametrize("ranks", [1, 2])
@one_fork
def test_any_shape_and_stride_comes_back(ranks: int) -> Forked:
    """Two ranks divide neither 15 elements nor 1. Dense strides stay as they are."""

    def run(rank: int) -> None:
        numbers = torch.arange(120.0)
        dense = [
            numbers[:15].view(3, 5),
            numbers.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            numbers.view(10, 12).t(),
            numbers[:1],
            numbers[:0].view(0, 4),
            torch.tensor(2.0),
        ]
        others = [numbers[:5].expand(3, 5), numbers[:3].view(3, 1).expand(3, 5), numbers.view(10, 12).t()[::3, 1:]]
        for number, x in enumerate([*dense, *others]):
            seen: list[Tensor] = []

            def function(value: Tensor, seen: list[Tensor] = seen) -> Tensor:
                seen.append(value.detach())
                return value.sin()

            mesh = _tensor_mesh(ranks) if ranks > 1 else None
            checkpoint(function, mesh)(_Same.apply(x.detach().requires_grad_())).sum().backward()
            assert torch.equal(seen[0], seen[1])
            assert seen[0].stride() == seen[1].stride() or number >= len(dense)

    yield On(ranks, run)


class _Same(torch.autograd.Function):
    """A tensor that a function has computed, with the strides of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@one_fork
def test_what_ranks_do_not_hold_alike_is_left_whole() -> Forked:
    """As sequence parallelism cuts it: a plain tensor by its values, a DTensor by its placement."""

    def run(rank: int) -> list[int]:
        ledger, mesh = Ledger(), _tensor_mesh()
        sent = []
        own = torch.full((2, 4), float(rank + 1), requires_grad=True)
        alike = torch.ones(2, 4, requires_grad=True)
        uneven = torch.ones(2 + rank, 4, requires_grad=True)
        whole = DTensor.from_local(alike, mesh, [Replicate()])
        cut = DTensor.from_local(own, mesh, [Shard(0)])
        for x in (own * 1, alike * 1, uneven * 1, whole * 1, cut * 1):
            before = ledger.total.bytes_sent("activations")
            y = checkpoint(torch.exp, mesh, ledger=ledger)(x)
            (y.to_local() if isinstance(y, DTensor) else y).sum().backward()
            sent.append(ledger.total.bytes_sent("activations") - before)
        torch.testing.assert_close(own.grad, 2 * own.detach().exp())
        torch.testing.assert_close(alike.grad, 2 * alike.detach().exp())
        return sent

    assert (yield On(2, run)) == [[0, 16, 0, 16, 0]] * 2


@one_fork
def test_autocast_is_as_it_was() -> Forked:
    def run(rank: int) -> None:
        seen = []

        def function(x: Tensor) -> Tensor:
            y = x @ x
            seen.append(y.dtype)
            return y.sin()

        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(function)(torch.ones(3, 3, requires_grad=True) * 1)
        y.sum().backward()
        assert seen == [torch.bfloat16] * 2

    yield On(1, run, group=False)


@one_fork
def test_evaluation_keeps_nothing_and_errors_leave_no_hook_behind() -> Forked:
    def run(rank: int) -> None:
        meter = Meter(Ledger())
        block = checkpoint(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), meter=meter)
        with torch.no_grad():
            block(torch.ones(2, 4))
        assert meter.live["checkpoints"] == 0
        with pytest.raises(RuntimeError, match="shapes"):
            block(torch.ones(2, 5, requires_grad=True))
        # A hook that was left would see this tensor saved.
        x = torch.ones(2, 4, requires_grad=True)
        (x * 1).exp().sum().backward()
        assert meter.live["checkpoints"] == 0
        block(x * 1).sum().backward()
        with pytest.raises(UsageError, match="checkpointed already"):
            checkpoint(block)

    yield On(1, run, group=False)


@one_fork
def test_what_cannot_work_says_so(tmp_path: Path) -> Forked:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match='None, "cpu" or the path'):
        checkpoint(torch.exp, offload="cuda")
    with pytest.raises(SettingsError, match="cannot write"):
        checkpoint(torch.exp, offload=tmp_path / "file")
    with pytest.raises(SettingsError, match="did you mean 'units'"):
        Activations(checkpoint="unit")
    with pytest.raises(SettingsError, match="makes none"):
        Activations(checkpoint="none", offload="cpu")

    def run(rank: int) -> None:
        with pytest.raises(SettingsError, match=r'mesh\["tensor"\]'):
            checkpoint(torch.exp, mesh_of())

    yield On(4, run)


@one_fork
def test_a_disk_that_is_full_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> Forked:
    """The system's limit on the size of a file stands for a full disk."""

    def run(rank: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        meter = Meter(Ledger())
        function = checkpoint(torch.exp, offload=tmp_path / "made", meter=meter)
        x = torch.ones(2048, requires_grad=True)
        with pytest.raises(OffloadError, match=r"reserve 8,192 bytes .*made'.*make room"):
            function(x * 1)
        gc.collect()
        assert list((tmp_path / "made").iterdir()) == []
        assert meter.off_device.get("checkpoints", 0) == 0
        function(x[:1024] * 1).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad[:1024], x.detach()[:1024].exp())

    yield On(1, run, group=False)


@one_fork
def test_an_offload_that_cannot_work_leaves_the_model_as_it_was(tmp_path: Path) -> Forked:
    (tmp_path / "file").write_text("")

    def run(rank: int) -> None:
        model = seeded(Stack)
        for offload in ("cuda", tmp_path / "file"):
            with pytest.raises(SettingsError, match="offload"):
                onecopy.shard(model, 3, activations=Activations(offload=offload))
        assert all(type(p) is nn.Parameter for p in model.parameters())
        settings: dict[str, Any] = {"stage": 3, "activations": Activations(offload="cpu")}
        assert_trains_like_twin(rank, 1, lambda: model, vector_batches(2), twin=lambda: seeded(Stack), **settings)

    yield On(1, run, group=False)


# --- units of a sharded model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_recomputed_units_train_like_one_process(stage: int, accumulate: int) -> Forked:
    """Plain recomputation: there is no tensor axis."""

    def run(rank: int) -> None:
        settings = {"stage": stage, "accumulate": accumulate, "clip": 0.5, "activations": Activations()}
        assert_trains_like_twin(rank, 2, lambda: seeded(TinyGPT), token_batches(4), **settings)
        assert_trains_like_twin(rank, 2, lambda: seeded(Stack), vector_batches(4), **settings)

    yield On(2, run)


@pytest.mark.parametrize("g", [1, 2])
@one_fork
def test_stage_3_gathers_a_unit_once_for_recomputation_and_backward(g: int) -> Forked:
    """Oracle: the ledger of the same run without recomputation, and the paper's 3gΨ."""

    def run(rank: int, activations: Activations | None) -> tuple[int, int, dict[str, int]]:
        model = onecopy.shard(seeded(TinyGPT, layers=3), 3, accumulate=g, activations=activations)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, 2) for batch in token_batches(3 * g)], accumulate=g)
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        calls = {f"{e.unit} {e.phase}": e.calls for e in traffic.entries if e.op == "all_gather"}
        return traffic.state_bytes, onecopy.padded_numel(model), calls

    for plain, recomputed in zip((yield On(2, run, None)), (yield On(2, run, Activations())), strict=True):
        assert plain == recomputed
        assert recomputed[0] == 3 * g * recomputed[1] // 2 * 4


@one_fork
def test_the_policy_leaves_out_root_single_layers_and_inner_units() -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(
            seeded(TinyGPT),
            3,
            units=["tokens", "blocks.0", "blocks.0.attention", "blocks.1"],
            activations=Activations(),
        )
        meter = onecopy.meter(model)
        loss = model(token_batches(1)[0][0])
        # Two checkpoints: 12 rows of 7 tokens and width 12, in fp32.
        assert meter.live["checkpoints"] == 2 * 12 * 7 * 12 * 4
        loss.backward()
        assert meter.live["checkpoints"] == 0

    yield On(1, run, group=False)


# --- ZeRO-R at 2×2 ranks


class _AllReduced(TorchDispatchMode):
    """Elements that a rank sends in the all-reduces of tensor parallelism, times M/(M - 1): twice what each reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._schema.name.endswith("::all_reduce"):
            self.elements += 2 * args[0].numel()
        return func(*args, **(kwargs or {}))


def _train(rank: int, stage: int, activations: Activations | None, sequence: bool = False) -> dict[str, Any]:
    """One step, then one each without and with torch's early stop of recomputation."""
    mesh = mesh_of()
    model = seeded(Gpt, LAYERS)
    parallelize(model, mesh["tensor"], sequence, head=sequence)
    onecopy.shard(model, stage, mesh=mesh, activations=activations)
    meter, ledger = onecopy.meter(model), onecopy.ledger(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = [part(batch, rank // 2, 2) for batch in token_batches(3, rows=ROWS, length=LENGTH)]
    loss = model(*batches[0])
    checkpoints = meter.live["checkpoints"], meter.off_device.get("checkpoints", 0)
    del loss
    gc.collect()
    run, traffic = train(model, optimizer, batches[:1], clip=0.5), []
    for early_stop, batch in zip((False, True), batches[1:], strict=True):
        with set_checkpoint_early_stop(early_stop), _AllReduced() as tensor_parallel:
            later = train(model, optimizer, [batch], clip=0.5)
        assert ledger.last_step is not None
        traffic.append((ledger.last_step.bytes_sent("activations"), tensor_parallel.elements))
        run.losses += later.losses
        run.norms += later.norms
    run.weights = full_weights(model)
    return {"run": run, "checkpoints": checkpoints, "traffic": traffic}


@cache
def _trained(stage: int, activations: Activations | None, sequence: bool = False) -> list[dict[str, Any]]:
    return run_ranks(4, _train, stage, activations, sequence)


@cache
def _twin() -> Run:
    def run(rank: int) -> Run:
        batches = token_batches(3, rows=ROWS, length=LENGTH)
        return train_twin(seeded(Gpt, LAYERS), OPTIMIZERS["sgd"], batches, clip=0.5)

    return run_ranks(1, run, group=False)[0]


SH = LENGTH * DIM
"""s·h: elements of one sample between two blocks."""

SAMPLES = ROWS // 2
"""b: samples of a rank."""


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_by_two_ranks_with_partitioned_checkpoints_train_like_one_process(stage: int, sequence: bool) -> None:
    expected = _twin()
    runs = [found["run"] for found in _trained(stage, Activations(), sequence)]
    means = [(a + b) / 2 for a, b in zip(runs[0].losses, runs[2].losses, strict=True)]
    assert means == pytest.approx(expected.losses, rel=1e-6)
    for found in runs:
        assert found.norms == pytest.approx(expected.norms, rel=2e-6)
        for name, value in expected.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("activations", [Activations(), Activations(offload="cpu"), Activations("selective")])
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
def test_partitioning_offloading_and_keeping_products_change_no_bit(activations: Activations, sequence: bool) -> None:
    """Against the same model recomputed without them, and not recomputed at all."""
    for plain, moved in zip(_trained(3, None, sequence), _trained(3, activations, sequence), strict=True):
        assert plain["run"].losses == moved["run"].losses
        assert plain["run"].norms == moved["run"].norms
        for name, value in plain["run"].weights.items():
            assert torch.equal(moved["run"].weights[name], value), name


def test_checkpoint_bytes_are_the_papers() -> None:
    """b·s·h·L elements (ZeRO §6.1; 4 bytes here); ÷ M with P_a, 0 on the device with P_a+cpu."""
    whole = SAMPLES * SH * LAYERS * 4
    cases = {
        Activations(partition=False): (whole, 0),
        Activations(): (whole // 2, 0),
        Activations(offload="cpu"): (0, whole // 2),
        Activations(partition=False, offload="cpu"): (0, whole),
    }
    for activations, expected in cases.items():
        assert [found["checkpoints"] for found in _trained(3, activations)] == [expected] * 4
    # Beside the cut input: q, k, v, attention and the MLP's first product of a rank's own heads and columns, with a
    # log-sum of each head; and the two products that are summed over the ranks, whole.
    own = 4 * DIM // 2 + 3 * DIM // 2 + HEADS // 2
    selective = whole // 2 + SAMPLES * LENGTH * LAYERS * (own + 2 * DIM) * 4
    assert [found["checkpoints"] for found in _trained(3, Activations("selective"))] == [(selective, 0)] * 4
    # Sequence parallelism has cut them along the sequence already.
    assert [found["checkpoints"] for found in _trained(3, Activations(), True)] == [(whole // 2, 0)] * 4


def test_partitioning_sends_a_twelfth_of_what_tensor_parallelism_sends() -> None:
    """ZeRO §8: s·h for each block and sample, beside 12·s·h; both times (M - 1)/M, here 1/2.

    The paper's 12 are two all-reduces each in forward, recomputation and backward. torch stops a recomputation when
    all that backward needs is there, which spares each block's last all-reduce: 10 are left.
    """
    for found in _trained(3, Activations()):
        for (activations, tensor_parallel), factor in zip(found["traffic"], (12, 10), strict=True):
            assert activations == LAYERS * SAMPLES * SH * 4 // 2
            assert tensor_parallel == factor * LAYERS * SAMPLES * SH
    for activations in (Activations(partition=False), None):
        assert [sent for found in _trained(3, activations) for sent, _ in found["traffic"]] == [0] * 8


# --- the paper's configurations

CONFIGURATIONS = {
    "C1": (1, Activations(partition=False)),
    "C2": (1, Activations()),
    "C3": (2, Activations(partition=False)),
    "C4": (2, Activations()),
    "C5": (2, Activations(offload="cpu")),
}
"""ZeRO Table 3. All have buffers of constant size (CB)."""


def _peak(rank: int, stage: int, activations: Activations) -> tuple[int, list[float]]:
    mesh = mesh_of()
    model = seeded(Gpt, 4)
    parallelize(model, mesh["tensor"], False, head=False)
    # Two micro-batches: stage 1 keeps whole gradients from one to the next, as the paper's keeps them to the step.
    onecopy.shard(model, stage, mesh=mesh, activations=activations, accumulate=2)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    meter = onecopy.meter(model)
    batches = [part(batch, rank // 2, 2) for batch in token_batches(4, rows=8 * ROWS, length=2 * LENGTH)]
    train(model, optimizer, batches[:2], accumulate=2, clip=0.5)
    meter.reset_peaks()
    losses = train(model, optimizer, batches[2:], accumulate=2, clip=0.5).losses
    return sum(meter.peak.values()), losses


def test_memory_falls_in_the_order_of_the_papers_five_configurations() -> None:
    """ZeRO Figures 6 to 8: the largest models of C1, C3, C2, C4, C5 are of 40, 50, 60, 140 and 150 B parameters."""
    found = {name: run_ranks(4, _peak, *settings) for name, settings in CONFIGURATIONS.items()}
    peak = {name: max(nbytes for nbytes, _ in ranks) for name, ranks in found.items()}
    assert peak["C1"] > peak["C3"] > peak["C2"] > peak["C4"] > peak["C5"], peak
    for ranks in found.values():
        for (_, losses), (_, expected) in zip(ranks, found["C1"], strict=True):
            assert losses == pytest.approx(expected, rel=1e-6)
