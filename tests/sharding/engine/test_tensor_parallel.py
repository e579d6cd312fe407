"""ZeRO × tensor parallel at 2×2 ranks equals one process on the whole batch. Oracle: oracle.py's twin, plain PyTorch.

Tensor parallelism is PyTorch's own `parallelize_module`; onecopy slices what it leaves on each rank.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)

import onecopy
from models import seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import MismatchError, SettingsError, UsageError
from oracle import OPTIMIZERS, Run, part, train, train_twin
from tensor_parallel_models import DIM, Gpt, full_weights, mesh_of, parallelize


def _train(rank: int, stage: int, sequence: bool, optimizer: str, accumulate: int, **settings: Any) -> Run:
    mesh = mesh_of()
    model = onecopy.shard(
        parallelize(seeded(Gpt), mesh["tensor"], sequence), stage, mesh=mesh, accumulate=accumulate, **settings
    )
    batches = [part(batch, rank // 2, 2) for batch in token_batches(4)]
    run = train(model, OPTIMIZERS[optimizer](model.parameters()), batches, accumulate=accumulate, clip=0.5)
    run.weights = full_weights(model)
    return run


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_two_by_two_ranks_train_like_one_process(stage: int, sequence: bool) -> Forked:
    """Losses, the global gradient norm (over both axes) before clipping, and whole weights after it."""
    loops = [("sgd", 2), ("adamw", 1), ("adamw-fused", 1)]

    def run(rank: int) -> list[Run]:
        return [_train(rank, stage, sequence, *loop) for loop in loops]

    def twin(rank: int) -> list[Run]:
        return [
            train_twin(seeded(Gpt), OPTIMIZERS[name], token_batches(4), accumulate=accumulate, clip=0.5)
            for name, accumulate in loops
        ]

    ranks = yield On(4, run)
    for loop, expected in enumerate((yield On(1, twin, group=False))[0]):
        runs = [found[loop] for found in ranks]
        assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
        means = [(a + b) / 2 for a, b in zip(runs[0].losses, runs[2].losses, strict=True)]
        assert means == pytest.approx(expected.losses, rel=1e-6)
        for found in runs:
            assert found.norms == pytest.approx(expected.norms, rel=2e-6)
            assert found.weights.keys() == expected.weights.keys()
            for name, value in expected.weights.items():
                torch.testing.assert_close(found.weights[name], value, rtol=0, atol=2e-5 if loop else 2e-6)


@one_fork
def test_replicated_copies_and_frozen_weights_train_like_one_process() -> Forked:
    """Hybrid sharding's replicate axis beside the tensor axis; a cut weight and a whole one are not trained."""

    def frozen() -> nn.Module:
        model = seeded(Gpt)
        for name in ("blocks.0.mlp.up.weight", "norm.weight"):
            model.get_parameter(name).requires_grad_(False)
        return model

    def run(rank: int) -> Run:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        model = onecopy.shard(parallelize(frozen(), mesh["tensor"], False), 3, mesh=mesh)
        batches = [part(batch, rank // 2, 2) for batch in token_batches(3)]
        found = train(model, OPTIMIZERS["sgd"](model.parameters()), batches, clip=0.5)
        found.weights = full_weights(model)
        return found

    def twin(rank: int) -> Run:
        return train_twin(frozen(), OPTIMIZERS["sgd"], token_batches(3), clip=0.5)

    (expected,) = yield On(1, twin, group=False)
    for found in (yield On(4, run)):
        assert found.norms == pytest.approx(expected.norms, rel=2e-6)
        for name, value in expected.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
@one_fork
def test_bf16_compute_over_fp32_masters(precision: str, stage: int) -> Forked:
    """Oracle: the fp32 twin, to what bf16's 8 bits allow; every rank of the tensor axis has the same loss."""

    def twin(rank: int) -> list[float]:
        return train_twin(seeded(Gpt), OPTIMIZERS["adamw"], token_batches(3)).losses

    def run(rank: int) -> list[float]:
        mesh = mesh_of()
        model = onecopy.shard(parallelize(seeded(Gpt), mesh["tensor"], False), stage, mesh=mesh, precision=precision)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        batches = [part(batch, rank // 2, 2) for batch in token_batches(3)]
        return train(model, OPTIMIZERS["adamw"](model.parameters()), batches).losses

    (expected,) = yield On(1, twin, group=False)
    losses = yield On(4, run)
    assert losses[0] == losses[1]
    means = [(a + b) / 2 for a, b in zip(losses[0], losses[2], strict=True)]
    assert means == pytest.approx(expected, rel=0.02)


def _sharded(stage: int, **settings: Any) -> nn.Module:
    mesh = mesh_of()
    return onecopy.shard(parallelize(seeded(Gpt), mesh["tensor"], False), stage, mesh=mesh, **settings)


def _shapes() -> dict[str, torch.Size]:
    return {name: p.shape for name, p in seeded(Gpt).named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_each_rank_holds_its_part_of_its_part(stage: int) -> Forked:
    """Oracle: shapes. What the plan cuts is divided by both degrees, what it leaves whole by the shard degree alone."""

    def run(rank: int) -> tuple[int, int, dict[str, torch.Size]]:
        model = _sharded(stage)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        return onecopy.meter(model).live["parameters_sliced"], onecopy.padded_numel(model), shapes

    whole = seeded(Gpt)
    names = ("attention.q", "attention.k", "attention.v", "attention.out.weight", "mlp.up", "mlp.down.weight", "head")
    cut = sum(p.numel() for n, p in whole.named_parameters() if any(part in n for part in names))
    left = sum(p.numel() for p in whole.parameters()) - cut
    for held, padded, shapes in (yield On(4, run)):
        assert shapes == _shapes()
        # VOCAB = 29 rows of the head are 15 and 14; every parameter and slice is aligned.
        assert padded == pytest.approx(left + cut / 2, rel=0.1)
        assert held == 4 * padded // (1 if stage == 0 else 2)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@one_fork
def test_norms_are_global_over_both_axes(order: float) -> Forked:
    """Whichever of torch's ways `get_total_norm` takes: foreach or one parameter after the other."""

    def norms(model: nn.Module, batch: Tensor) -> list[float]:
        model(batch).backward()
        gradients = [p.grad for p in model.parameters()]
        return [nn.utils.get_total_norm(gradients, order, foreach=f).item() for f in (None, True, False)]

    ((batch,),) = token_batches(1)
    (expected,) = yield On(1, lambda rank: norms(seeded(Gpt), batch), group=False)
    for found in (yield On(4, lambda rank: norms(_sharded(2), batch))):
        assert found == pytest.approx(expected, rel=1e-5)


@one_fork
def test_norm_takes_one_small_message_for_each_axis() -> Forked:
    def run(rank: int) -> dict[str, int]:
        model = _sharded(3)
        model(token_batches(1)[0][0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sent = onecopy.ledger(model).current
        return {axis: sent.bytes_sent("norm", axis=axis) for axis in ("shard", "tensor")}

    # float64: of what is cut and what is not over shard, of what is cut over tensor.
    assert (yield On(4, run)) == [{"shard": 16, "tensor": 8}] * 4


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@one_fork
def test_the_meter_counts_the_same_after_every_step(stage: int, sequence: bool, accumulate: int) -> Forked:
    """An embedding's gradient may come in another placement, and so in another size, than what is sent of it."""

    def run(rank: int) -> list[dict[str, int]]:
        mesh = mesh_of()
        model = onecopy.shard(
            parallelize(seeded(Gpt), mesh["tensor"], sequence), stage, mesh=mesh, accumulate=accumulate
        )
        optimizer, seen = OPTIMIZERS["sgd"](model.parameters()), []
        for (batch,) in token_batches(4):
            train(model, optimizer, [part((batch,), rank // 2, 2)] * accumulate, accumulate=accumulate)
            seen.append(dict(onecopy.meter(model).live))
        return seen

    for first, *later in (yield On(4, run)):
        assert first["gradients_whole"] == 0
        assert later == [first] * 3


@one_fork
def test_gathered_shows_dtensors_and_keeps_edits() -> Forked:
    def run(rank: int) -> tuple[dict[str, Tensor], bool]:
        model = _sharded(3)
        with onecopy.gathered(model, write=True):
            weight = model.get_parameter("blocks.0.mlp.up.weight")
            assert isinstance(weight, DTensor)
            assert weight.shape == (3 * DIM, DIM)
            with torch.no_grad():
                weight.mul_(2)
                model.get_parameter("norm.weight").add_(1)
        with pytest.raises(UsageError, match="write=True"), onecopy.gathered(model), torch.no_grad():
            model.get_parameter("blocks.0.mlp.up.weight").add_(1)
        with onecopy.gathered(model):
            state = model.state_dict()
            assert {name: value.shape for name, value in state.items()} == _shapes()
        return full_weights(model), isinstance(state["blocks.1.mlp.up.weight"], DTensor)

    def twin(rank: int) -> dict[str, Tensor]:
        model = seeded(Gpt)
        with torch.no_grad():
            model.get_parameter("blocks.0.mlp.up.weight").mul_(2)
            model.get_parameter("norm.weight").add_(1)
        return {name: p.detach() for name, p in model.named_parameters()}

    (expected,) = yield On(1, twin, group=False)
    for found, is_dtensor in (yield On(4, run)):
        assert is_dtensor
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def _with_other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape).remainder(97).add(number))
    return model


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "dtensors"])
@one_fork
def test_load_state_dict_takes_whole_tensors(placed: bool) -> Forked:
    """Of one process, or of a model that is tensor-parallel alone."""

    def run(rank: int) -> dict[str, Tensor]:
        model = _sharded(3)
        source = _with_other_values(seeded(Gpt))
        if placed:
            source = parallelize(source, mesh_of()["tensor"], False)
        model.load_state_dict(source.state_dict())
        return full_weights(model)

    (expected,) = yield On(1, lambda rank: _with_other_values(seeded(Gpt)).state_dict(), group=False)
    for found in (yield On(4, run)):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@one_fork
def test_an_optimizer_made_before_keeps_its_states() -> Forked:
    """Two steps tensor-parallel alone, then two sharded, are the twin's four steps."""
    batches = token_batches(4)

    def run(rank: int) -> dict[str, Tensor]:
        mesh = mesh_of()
        model = parallelize(seeded(Gpt), mesh["tensor"], False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for (batch,) in batches[:2]:
            # Not `train`: torch's own norm refuses a mixture of DTensors and plain tensors.
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        onecopy.shard(model, 2, mesh=mesh, optimizer=optimizer)
        train(model, optimizer, [part(batch, rank // 2, 2) for batch in batches[2:]])
        return full_weights(model)

    def twin(rank: int) -> dict[str, Tensor]:
        return train_twin(seeded(Gpt), OPTIMIZERS["adamw-loop"], batches).weights

    (expected,) = yield On(1, twin, group=False)
    for found in (yield On(4, run)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)


@one_fork
def test_plain_parameters_and_buffers_take_the_first_ranks_values_over_the_tensor_axis_too() -> Forked:
    def run(rank: int) -> tuple[float, float]:
        first, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        nn.init.constant_(first.weight, rank)
        norm.running_mean.fill_(rank)
        model, mesh = nn.Sequential(first, norm, nn.Linear(4, 4)), mesh_of()
        parallelize_module(model, mesh["tensor"], {"2": ColwiseParallel(output_layouts=Replicate())})
        onecopy.shard(model, 3, mesh=mesh)
        with onecopy.gathered(model):
            return first.weight.abs().max().item(), norm.running_mean.abs().max().item()

    assert (yield On(4, run)) == [(0, 0)] * 4


@one_fork
def test_an_overflow_on_one_rank_is_known_on_both_axes() -> Forked:
    """GradScaler must skip the step on every rank; the infinity lies in the part of one tensor rank."""

    def run(rank: int) -> float:
        model = _sharded(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(token_batches(1)[0][0])).backward()
        if rank == 3:
            model.get_parameter("blocks.0.mlp.up.weight").grad.local.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert (yield On(4, run)) == [1.0] * 4


@one_fork
def test_meta_models_are_materialized() -> Forked:
    def run(rank: int) -> None:
        mesh = mesh_of()
        with torch.device("meta"):
            model = Gpt()
        model = onecopy.shard(parallelize(model, mesh["tensor"], False), 3, mesh=mesh)

        def init(module: nn.Module) -> None:
            with torch.no_grad():
                for name, p in module.named_parameters(recurse=False):
                    p.fill_(1.25 if name == "bias" else 0.25)

        onecopy.materialize(model, init=init)
        for name, value in full_weights(model).items():
            expected = torch.full(_shapes()[name], 1.25 if name.endswith("bias") else 0.25)
            assert torch.equal(value, expected), name
        assert model(token_batches(1)[0][0]).isfinite()

    yield On(4, run)


@one_fork
def test_what_cannot_work_says_so() -> Forked:
    def run(rank: int) -> None:
        mesh = mesh_of()
        model = parallelize(seeded(Gpt), mesh["tensor"], False)
        with pytest.raises(SettingsError, match=r"also on the shard axis.*mesh=mesh"):
            onecopy.shard(model, 3)
        with pytest.raises(SettingsError, match=r"DTensors over ranks .* has"):
            onecopy.shard(model, 3, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard")))
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)]))
        with pytest.raises(SettingsError, match="over a mesh of 2 axes"):
            onecopy.shard(layer, 3, mesh=mesh)
        model.get_parameter("norm.weight").requires_grad_(rank % 2 == 0)
        with pytest.raises(MismatchError, match=r"norm\.weight"):
            onecopy.shard(model, 3, mesh=mesh)

    yield On(4, run)
