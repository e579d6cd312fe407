"""States on disk: the run is bit for bit that without offload.

The oracle is the same loop on the same model sharded without ``offload=``, which other files hold against one process.
"""

from __future__ import annotations

import copy
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizers import ELEMENTWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from onecopy import Offload
from onecopy.comm.dtensors import local_of
from onecopy.errors import OffloadError, SettingsError, UsageError
from onecopy.sharding.setup.api import engine_of
from onecopy.sharding.tensor.resting import RestingTensor
from oracle import OPTIMIZERS, assert_same_weights, gathered_weights, part, train
from ranks import run_ranks

Result = tuple[Any, dict[str, Tensor]]
Loop = Callable[[nn.Module, int], Any]
"""Trains on this rank; what it returns is compared."""


def _both(
    rank: int, directory: Path, loop: Loop, stage: int = 2, parameters: bool = False, kind: Any = Stack, **settings: Any
) -> None:
    """Run ``loop`` with and without offload and compare what it returns, and the weights, to the last bit."""
    offload = Offload(optimizer=directory, parameters=directory if parameters else None)
    results = []
    for where in (None, offload):
        model = onecopy.shard(seeded(kind), stage, offload=where, **settings)
        results.append((loop(model, rank), gathered_weights(model)))
    (expected, weights), (found, moved) = results
    assert found == expected
    assert_same_weights(moved, weights, atol=0)


def _loss(model: nn.Module, index: int, rank: int, num_ranks: int) -> Tensor:
    loss: Tensor = model(*part(vector_batches(8)[index], rank, num_ranks))
    return loss


# --- settings


@pytest.mark.parametrize(
    "offload, stage, told",
    [
        (Offload(), 2, "nothing is moved"),
        (Offload(optimizer="cpu"), 0, "take stage 1, 2 or 3"),
        (Offload(optimizer="nvme"), 2, "path of a directory"),
        (Offload(optimizer="CPU"), 2, "path of a directory"),
        (Offload(optimizer="cpu", prefetch=3), 2, r"give Offload\(parameters=\) too"),
        (Offload(optimizer="~/states"), 2, "~ is not expanded"),
        (Offload(optimizer=3), 2, "path of a directory"),  # type: ignore[arg-type]
        (Offload(optimizer="cpu", prefetch=-1), 2, "prefetch"),
        (Offload(optimizer="cpu", parameters="cpu"), 2, "Take stage= 3"),
        (Offload(parameters="cpu"), 3, r"give Offload\(optimizer=\) too"),
        (Offload(optimizer="cpu", parameters="/some/where"), 3, r"give Offload\(optimizer=\) a directory too"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_made(offload: Offload, stage: int, told: str) -> None:
    model = Stack()
    with pytest.raises(SettingsError, match=told):
        onecopy.shard(model, stage, offload=offload)
    assert type(next(model.parameters())) is nn.Parameter


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match="which is not a directory"):
        onecopy.shard(Stack(), 2, offload=Offload(optimizer=tmp_path / "file"))
    with pytest.raises(SettingsError, match=r"onecopy\.Offload"):
        onecopy.shard(Stack(), 2, offload=str(tmp_path))  # type: ignore[arg-type]


def test_host_memory_is_where_states_of_the_cpu_rest_already() -> None:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3, offload=Offload(optimizer="cpu"))
        plain = onecopy.shard(seeded(Stack), 3)
        for each in (model, plain):
            train(each, AdamW(each.parameters(), lr=1e-2), [part(b, rank, 2) for b in vector_batches(2)])
        assert_same_weights(gathered_weights(model), gathered_weights(plain), atol=0)
        assert onecopy.meter(model).live == onecopy.meter(plain).live

    run_ranks(2, run)


def test_masters_that_are_too_narrow_are_refused(tmp_path: Path) -> None:
    model = Stack().to(torch.bfloat16)
    with pytest.raises(SettingsError, match=r'pass precision="bf16"'):
        onecopy.shard(model, 2, offload=Offload(optimizer=tmp_path))
    assert type(next(model.parameters())) is nn.Parameter


# --- parity


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_run_equals_the_one_without_offload(num_ranks: int, tmp_path: Path) -> None:
    """Stages, precisions, accumulation and clipping; parameters in memory and on disk."""

    def run(rank: int) -> None:
        for stage, parameters, precision, accumulate, name in (
            (1, False, "fp32", 3, "adamw-fused"),
            (1, False, "bf16", 1, "sgd"),
            (2, False, "fp32", 2, "sgd"),
            (2, False, "bf16", 2, "adamw"),
            (3, False, "bf16", 1, "adamw-fused"),
            (3, True, "fp32", 2, "adamw-loop"),
            (3, True, "bf16", 1, "adamw-fused"),
            (3, True, "bf16-lean", 2, "adamw-fused"),
        ):

            def loop(model: nn.Module, rank: int, name: str = name, accumulate: int = accumulate) -> Any:
                batches = [part(batch, rank, num_ranks) for batch in token_batches(2 * accumulate)]
                done = train(model, OPTIMIZERS[name](model.parameters()), batches, accumulate=accumulate, clip=0.5)
                return done.losses, done.norms

            _both(rank, tmp_path, loop, stage, parameters, TinyGPT, precision=precision, accumulate=accumulate)

    run_ranks(num_ranks, run, timeout=100)
    assert list(tmp_path.iterdir()) == []


def test_every_elementwise_optimizer_steps_as_without_offload(tmp_path: Path) -> None:
    """Weights, states and groups; with a schedule and groups that cut through units."""

    def run(rank: int) -> None:
        for name, make in ELEMENTWISE.items():

            def loop(model: nn.Module, rank: int, make: Callable[[Any], Optimizer] = make) -> Any:
                flat = [p for p in model.parameters() if p.ndim == 1]
                optimizer = make([p for p in model.parameters() if p.ndim > 1])
                optimizer.add_param_group({"params": flat, "lr": optimizer.param_groups[0]["lr"] / 2})
                schedule = LambdaLR(optimizer, lambda step: 0.5**step)
                for index in range(3):
                    _loss(model, index, rank, 1).backward()
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                return _values(optimizer.state_dict())

            try:
                _both(rank, tmp_path, loop)
            except AssertionError as error:
                raise AssertionError(name) from error

    run_ranks(1, run, group=False)


def _values(value: Any) -> Any:
    """Nested containers with tensors as lists, so that they can be compared."""
    if isinstance(value, onecopy.SlicedTensor):
        return value.local.tolist()
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _values(item) for key, item in value.items() if key not in ("foreach",)}
    return [_values(item) for item in value] if isinstance(value, list | tuple) else value


def test_states_and_gradients_rest_and_take_no_memory(tmp_path: Path) -> None:
    """What is in memory is the pool, three of the largest bucket's slices, for four layers as for twelve."""

    def run(_: int) -> list[dict[str, int]]:
        held = []
        for layers in (4, 12):
            model = onecopy.shard(seeded(Stack, 64, layers), 3, offload=Offload(tmp_path, tmp_path))
            optimizer = AdamW(model.parameters(), lr=1e-2, foreach=True)
            for _ in range(2):
                model(torch.ones(2, 64), torch.ones(2, 3)).backward()
                optimizer.step()
            parameter = model.blocks[0][0].weight
            assert isinstance(parameter.grad, RestingTensor)
            states = optimizer.state[parameter]
            assert isinstance(states["exp_avg"], RestingTensor)
            assert isinstance(states["exp_avg_sq"], RestingTensor)
            held.append(dict(onecopy.meter(model).live))
            largest = max(b.layout.slice_numel for unit in engine_of(model).units for b in unit.buckets)
            assert held[-1]["communication"] <= 3 * 4 * (4 * largest + 4096) + 2 * 4 * largest
        return held

    ((small, large),) = run_ranks(1, run, group=False)
    counters = 4
    assert large["optimizer"] - small["optimizer"] == counters * 4 * 8, "Adam's step counts stay in memory"
    assert {**large, "optimizer": 0} == {**small, "optimizer": 0}
    assert small["parameters_sliced"] == small["gradients_sliced"] == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_on_disk_and_moved_are_those_of_the_formulas(num_ranks: int, tmp_path: Path) -> None:
    """ZeRO-Infinity's states with AdamW, of P elements a rank: 16 P rest; a step reads 16 P and writes 12 P.

    A backward writes 4 P more. In bf16 stage 3 reads 2 P of parameters in forward and as much in backward, and a step
    writes 2 P of them.
    """

    def run(rank: int) -> None:
        for stage, parameters, wide in ((2, False, True), (3, True, True), (3, True, False)):
            settings: dict[str, Any] = {} if wide else {"precision": "bf16"}
            offload = Offload(tmp_path, tmp_path if parameters else None)
            model = onecopy.shard(seeded(Stack, 64), stage, offload=offload, **settings)
            optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
            for _ in range(3):
                model(torch.ones(2, 64), torch.ones(2, 3)).backward()
                optimizer.step()
                optimizer.zero_grad()
            numels = [b.layout.slice_numel for unit in engine_of(model).units for b in unit.buckets]
            p = sum(numels)
            step = onecopy.ledger(model).last_step
            assert step is not None
            read, written = step.bytes_sent("from disk", "step"), step.bytes_sent("to disk", "step")
            # A step moves whole blocks of 4096 bytes.
            blocks = 4096 * sum(-(-4 * n // 4096) for n in numels)
            assert (read, written) == (4 * blocks, 3 * blocks + (0 if wide else 2 * p))
            assert step.bytes_sent("to disk", "backward") == 4 * p
            # The last unit is kept from forward to backward where nothing comes in between.
            both = step.bytes_sent("from disk", "forward"), step.bytes_sent("from disk", "backward")
            width = 0 if not parameters else 4 if wide else 2
            assert both[0] == width * p
            assert 0.5 * width * p <= both[1] <= width * p
            moved = onecopy.meter(model).off_device
            assert moved["parameters_sliced, on disk"] == (4 if wide else 6) * p
            assert moved["gradients_sliced, on disk"] == 4 * p
            assert moved["optimizer, on disk"] == 8 * p
            assert "optimizer, on disk" in onecopy.meter(model).table()
            assert onecopy.meter(model).live["parameters_sliced"] == (0 if parameters else 4 * p)

    run_ranks(num_ranks, run)


# --- what loops do


def test_loops_that_keep_scale_edit_and_zero_gradients(tmp_path: Path) -> None:
    def keeps(model: nn.Module, rank: int) -> Any:
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        for index in range(3):
            _loss(model, index, rank, 2).backward()
            optimizer.step()
        return [p.grad.sum().item() for p in model.parameters() if p.grad is not None]

    def zeroes(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        for index in range(3):
            optimizer.zero_grad(set_to_none=False)
            _loss(model, index, rank, 2).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5).clamp_(-0.1, 0.1)
            clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            optimizer.step()

    def scales(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
        sizes = []
        for index in range(6):
            scaler.scale(_loss(model, index, rank, 2)).backward()
            scaler.unscale_(optimizer)
            sizes.append(clip_grad_norm_(model.parameters(), 0.5).isfinite().item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return sizes, scaler.get_scale()

    def scales_fused(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for index in range(3):
            scaler.scale(_loss(model, index, rank, 2)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.grad.sum().item() for p in model.parameters() if p.grad is not None]

    def closes(model: nn.Module, rank: int) -> Any:
        optimizer = SGD(model.parameters(), lr=0.05)

        def closure() -> float:
            optimizer.zero_grad()
            loss = _loss(model, 0, rank, 2)
            loss.backward()
            return float(loss)

        return [optimizer.step(closure) for _ in range(3)]

    def run(rank: int) -> None:
        for loop in (keeps, zeroes, scales, scales_fused, closes):
            for stage in (1, 3):
                _both(rank, tmp_path, loop, stage, accumulate=1)

    run_ranks(2, run)


def test_a_gradient_that_was_reduced_stays_beside_micro_batches_that_are_kept(tmp_path: Path) -> None:
    """Stage 1 keeps whole gradients between steps that clear none."""

    def loop(model: nn.Module, rank: int) -> Any:
        optimizer = SGD(model.parameters(), lr=0.05)
        for index in range(4):
            _loss(model, index, rank, 2).backward()
            if index % 2:
                optimizer.step()

    run_ranks(2, lambda rank: _both(rank, tmp_path, loop, 1, accumulate=2))


class Halves(nn.Module):
    """Ranks use different blocks, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor, which: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.blocks[which](x)), y)


def test_parameters_that_some_ranks_or_none_use(tmp_path: Path) -> None:
    def loop(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for index in range(3):
            loss = model(*part(vector_batches(3)[index], rank, 2), (rank + index) % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*optimizer.state[model.blocks[3].weight], model.blocks[3].weight.grad]

    def run(rank: int) -> None:
        for stage in (1, 2):
            _both(rank, tmp_path, loop, stage, kind=Halves, units=[nn.Linear])

    run_ranks(2, run)


def test_hybrid_sharding_keeps_each_copy_in_its_ranks_own_file(tmp_path: Path) -> None:
    def loop(model: nn.Module, rank: int) -> Any:
        batches = [part(b, rank, 4) for b in vector_batches(3)]
        return train(model, AdamW(model.parameters(), lr=1e-2), batches, clip=0.5).losses

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for stage, parameters in ((2, False), (3, True)):
            _both(rank, tmp_path, loop, stage, parameters, mesh=mesh)

    run_ranks(4, run)


def test_frozen_parameters_rest_where_parameters_do(tmp_path: Path) -> None:
    class Frozen(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].requires_grad_(False)
            self.blocks[2][0].requires_grad_(False)

    def loop(model: nn.Module, rank: int) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        batches = [part(b, rank, 2) for b in vector_batches(3)]
        return train(model, AdamW(trained, lr=1e-2), batches).losses

    def run(rank: int) -> None:
        for parameters in (False, True):
            for precision in (None, "bf16"):
                _both(rank, tmp_path, loop, 3, parameters, Frozen, precision=precision)

    run_ranks(2, run)


# --- parameters at rest


def test_parameters_at_rest_can_be_read_edited_averaged_and_saved(tmp_path: Path) -> None:
    def loop(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        average = onecopy.ema(model, 0.5)
        for index in range(2):
            _loss(model, index, rank, 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        first = model.blocks[0][0].weight
        facts = [first.norm().item(), first.sum().item(), first.abs().max().item(), (first * 2).sum().item()]
        with torch.no_grad():
            first.mul_(1.5)
            first.data.add_(0.25)
            torch._foreach_mul_(list(model.parameters()), 0.75)
        with torch.no_grad(), onecopy.gathered(model, write=True):
            model.head.bias.fill_(0.125)
        with average.applied():
            facts.append(_loss(model, 3, rank, 2).item())
        facts.append(_loss(model, 3, rank, 2).item())
        own = copy.deepcopy(optimizer.state_dict())
        path = tmp_path / f"own-{rank}.pt"
        torch.save({"model": model.state_dict(), "optimizer": own}, path)
        with torch.no_grad():
            first.zero_()
        loaded = torch.load(path)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        _loss(model, 4, rank, 2).backward()
        optimizer.step()
        return facts, _values(optimizer.state_dict())

    def run(rank: int) -> None:
        for stage, parameters in ((1, False), (3, True)):
            _both(rank, tmp_path / "states", loop, stage, parameters)

    run_ranks(2, run)


def test_tensors_of_its_size_are_made_from_a_parameter_at_rest(tmp_path: Path) -> None:
    """Oracle: what a parameter in memory makes."""

    def run(_: int) -> None:
        model = onecopy.shard(seeded(Stack), 2, offload=Offload(optimizer=tmp_path))
        plain = onecopy.shard(seeded(Stack), 2)
        for at_rest, in_memory in zip(model.parameters(), plain.parameters(), strict=True):
            for made, expected in (
                (at_rest.new_zeros(at_rest.size()), in_memory.new_zeros(in_memory.size())),
                (at_rest.new_full((3,), 2.0), in_memory.new_full((3,), 2.0)),
            ):
                assert type(made) is type(expected)
                values = [
                    value.local if isinstance(value, onecopy.SlicedTensor) else value for value in (made, expected)
                ]
                assert torch.equal(*values)

    run_ranks(1, run, group=False)


def test_an_optimizer_made_before_sharding_brings_its_states(tmp_path: Path) -> None:
    def run(_: int) -> None:
        found = []
        for offload in (None, Offload(optimizer=tmp_path)):
            model = seeded(Stack)
            optimizer = Adam(model.parameters(), lr=1e-2)
            model(*vector_batches(1)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            model = onecopy.shard(model, 2, optimizer=optimizer, offload=offload)
            train(model, optimizer, vector_batches(3))
            found.append(gathered_weights(model))
        assert_same_weights(found[1], found[0], atol=0)
        assert all(isinstance(s["exp_avg"], RestingTensor) for s in optimizer.state.values())

    run_ranks(1, run, group=False)


# --- faults


def test_an_optimizer_that_needs_everything_at_once_is_refused(tmp_path: Path) -> None:
    def run(_: int) -> None:
        model = onecopy.shard(seeded(Stack), 2, offload=Offload(optimizer=tmp_path))
        optimizer = torch.optim.LBFGS(model.parameters())
        model(*vector_batches(1)[0]).backward()
        with pytest.raises(UsageError, match="LBFGS needs all parameters at once"):
            optimizer.step(lambda: 0.0)

        class Counting(SGD):
            """Leaves in each group how many parameters it has, and says that it does not."""

            updates_each_element_alone = True

            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    group["seen"] = len(group["params"])

        counting = Counting(model.parameters())
        with pytest.raises(UsageError, match="'seen' in a group"):
            counting.step()

    run_ranks(1, run, group=False)


def test_a_disk_that_fails_in_a_step_is_named_and_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def run(_: int) -> str:
        model = onecopy.shard(seeded(Stack), 2, offload=Offload(optimizer=tmp_path))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model(*vector_batches(1)[0]).backward()
        optimizer.step()
        model(*vector_batches(1)[0]).backward()
        write = os.pwritev
        calls = []

        def failing(*given: Any) -> int:
            calls.append(given)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*given)

        monkeypatch.setattr(os, "pwritev", failing)
        with pytest.raises(OffloadError, match="No space left on device; make room there") as caught:
            optimizer.step()
        stores = engine_of(model).stores
        assert stores is not None
        assert stores.pool._lent == 0
        return str(caught.value)

    (message,) = run_ranks(1, run, group=False)
    assert str(tmp_path) in message


def test_an_optimizer_that_raises_leaves_nothing_in_memory(tmp_path: Path) -> None:
    class Fails(SGD):
        updates_each_element_alone = True

        def step(self, closure: Any = None) -> Any:
            for number, group in enumerate(self.param_groups):
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
                if number == 1:
                    raise ArithmeticError("in the middle")

    def run(_: int) -> None:
        model = onecopy.shard(seeded(Stack), 2, offload=Offload(optimizer=tmp_path))
        before = gathered_weights(model)
        model(*vector_batches(1)[0]).backward()
        with pytest.raises(ArithmeticError):
            Fails(model.parameters()).step()
        stores = engine_of(model).stores
        assert stores is not None
        assert stores.pool._lent == 0
        after = gathered_weights(model)
        moved = [name for name in before if torch.equal(after[name], before[name] + 1.0)]
        assert 2 <= len(moved) < len(before), "what was updated before the error is, as in memory"
        train(model, SGD(model.parameters(), lr=0.1), vector_batches(1))

    run_ranks(1, run, group=False)


# --- beside other things


def test_tensor_parallel_parameters_rest_too(tmp_path: Path) -> None:
    """With partitioned activation checkpoints (P_a) on the same ranks. Oracle: the same run without offload."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    def run(rank: int) -> None:
        for stage, parameters, activations in ((2, None, None), (3, tmp_path, onecopy.Activations())):
            found = []
            for offload in (None, Offload(tmp_path, parameters)):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
                model: Any = seeded(Wide)
                for block in model.blocks:
                    parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
                onecopy.shard(model, stage, mesh=mesh, offload=offload, activations=activations)
                optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank // 2))
                losses = []
                for _ in range(3):
                    loss = model(x)
                    loss.backward()
                    norm = clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses += [loss.item(), float(norm)]
                with onecopy.gathered(model):
                    weights = [local_of(p).detach().clone() for p in model.parameters()]
                found.append((losses, weights))
            (expected, weights), (moved, moved_weights) = found
            assert moved == expected
            assert all(torch.equal(a, b) for a, b in zip(weights, moved_weights, strict=True))

    run_ranks(4, run)


def test_worker_processes_of_a_data_loader_and_evaluation_come_in_between(tmp_path: Path) -> None:
    """Workers are forked from the rank, and have its file's handle."""

    def loop(model: nn.Module, rank: int) -> Any:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            for x, y in DataLoader(TensorDataset(*vector_batches(1)[0]), batch_size=4, num_workers=1):
                loss = model(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                losses.append(model(*vector_batches(1)[0]).item())
            model.train()
        return losses

    run_ranks(1, lambda rank: _both(rank, tmp_path, loop, 3, True), group=False)


# --- optimizers of one's own, whose step may depend on more than each element


class _ByPlace(SGD):
    """Rates by a parameter's place, what came before it, and a random number for each."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.largest = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        generator = torch.Generator().manual_seed(1)
        for group in self.param_groups:
            rates = [0.1 / (1 + place) for place in range(len(group["params"]))]
            for place, (parameter, rate) in enumerate(zip(group["params"], rates, strict=True)):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                self.largest = 0.5 * self.largest + parameter.grad.abs().max()
                state["sum"].mul_(0.9).add_(parameter.grad)
                noise = torch.randn((), generator=generator).item()
                parameter.add_(state["sum"], alpha=-rate * (1 + 0.1 * noise + 0.01 * place) / (1 + float(self.largest)))


@pytest.mark.parametrize("num_ranks, stage", [(1, 3), (2, 1), (2, 3)])
def test_a_step_that_knows_a_parameters_place_steps_as_without_offload(
    num_ranks: int, stage: int, tmp_path: Path
) -> None:
    def loop(model: nn.Module, rank: int) -> list[float]:
        optimizer, losses = _ByPlace(model.parameters(), lr=1.0), []
        for index in range(3):
            loss = _loss(model, index, rank, num_ranks)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        resting = [isinstance(state["sum"], RestingTensor) for state in optimizer.state.values()]
        assert all(resting) is isinstance(next(iter(model.parameters())), RestingTensor)
        return [*losses, float(optimizer.largest)]

    run_ranks(num_ranks, lambda rank: _both(rank, tmp_path, loop, stage, parameters=stage == 3))


# --- disks that have no room


def _room(nbytes: int) -> None:
    """Let files of this process grow to so many bytes, as far as the kernel is asked; -1 for as many as they like."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def test_a_disk_without_room_leaves_the_model_as_it_was_on_every_rank(tmp_path: Path) -> None:
    """Oracle: the kernel lets no file of the first rank's grow. The same call works once there is room."""

    def run(rank: int) -> str:
        model = seeded(Stack)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if rank == 0:
            _room(4096)
        with pytest.raises(OffloadError) as caught:
            onecopy.shard(model, 3, offload=Offload(tmp_path))
        _room(resource.RLIM_INFINITY)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        onecopy.shard(model, 3, offload=Offload(tmp_path))
        assert_same_weights(gathered_weights(model), before, atol=0)
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert "cannot reserve" in first
    assert "rank 0 has no room" in second


def test_a_step_that_finds_no_room_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    """And goes on as if it had not been tried, once there is room. Oracle: the same steps without offload."""

    def steps(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
        for index in range(2):
            _loss(model, index, rank, 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(rank: int) -> list[str]:
        told = []
        # States of the first step; of several kinds; made with the optimizer, and cut at the first step.
        for name in ("SGD nesterov", "Adam amsgrad", "RMSprop", "Adagrad"):
            make = ELEMENTWISE[name]
            model = onecopy.shard(seeded(Stack), 3, offload=Offload(tmp_path))
            twin = onecopy.shard(seeded(Stack), 3)
            before = gathered_weights(model)
            optimizer = make(model.parameters())
            _loss(model, 0, rank, 2).backward()
            if rank == 0:
                # Room for the states of some units and not of all.
                _room(engine_of(model).stores.optimizer.size + 4096)  # type: ignore[union-attr]
            with pytest.raises(OffloadError) as caught:
                optimizer.step()
            _room(resource.RLIM_INFINITY)
            told.append(str(caught.value))
            assert_same_weights(gathered_weights(model), before, atol=0)
            assert onecopy.meter(model).off_device.get("optimizer, on disk", 0) == 0
            optimizer.zero_grad()
            steps(model, optimizer, rank)
            steps(twin, make(twin.parameters()), rank)
            assert_same_weights(gathered_weights(model), gathered_weights(twin), atol=0)
        return told

    for first, second in zip(*run_ranks(2, run), strict=True):
        assert "cannot reserve" in first
        assert "rank 0 has no room" in second


def test_the_room_of_a_dropped_optimizers_states_is_given_to_the_next(tmp_path: Path) -> None:
    def run(rank: int) -> list[int]:
        model = onecopy.shard(seeded(Stack), 3, offload=Offload(tmp_path))
        sizes = []
        for _ in range(3):
            optimizer = AdamW(model.parameters())
            scheduler = LambdaLR(optimizer, lambda step: 1.0)
            for index in range(2):
                _loss(model, index, 0, 1).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            sizes.append(engine_of(model).stores.optimizer.size)  # type: ignore[union-attr]
            del optimizer, scheduler
        return sizes

    ((first, second, third),) = run_ranks(1, run)
    assert first == second == third


def test_after_a_step_that_found_no_room_a_loaded_run_goes_on(tmp_path: Path) -> None:
    """Oracle: the same steps without offload and without the accident."""

    def steps(model: nn.Module, optimizer: Optimizer, indices: range) -> None:
        for index in indices:
            _loss(model, index, 0, 1).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3, offload=Offload(tmp_path / "states"))
        onecopy.save(tmp_path / "saved", model)
        optimizer = AdamW(model.parameters())
        _room(engine_of(model).stores.optimizer.size)  # type: ignore[union-attr]
        with pytest.raises(OffloadError, match="cannot reserve"):
            steps(model, optimizer, range(1))
        _room(resource.RLIM_INFINITY)
        onecopy.load(tmp_path / "saved", model)
        optimizer = AdamW(model.parameters())
        optimizer.zero_grad()
        steps(model, optimizer, range(3))
        twin = onecopy.shard(seeded(Stack), 3)
        steps(twin, AdamW(twin.parameters()), range(3))
        assert_same_weights(gathered_weights(model), gathered_weights(twin), atol=0)

    run_ranks(1, run)
