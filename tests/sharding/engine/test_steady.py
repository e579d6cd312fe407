"""Nothing grows: bytes of tensors and numbers of objects are the same after every step, evaluation and gathered block.

Oracle: the garbage collector's list of everything alive, which knows nothing of onecopy's own accounting.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from oracle import OPTIMIZERS, part, train
from ranks import run_ranks


def _run_apart(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """As `run_ranks`; what was alive before, the imported packages above all, is left out of every count."""

    def run(rank: int) -> Any:
        gc.collect()
        gc.freeze()
        return function(rank)

    return run_ranks(num_ranks, run)


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _nbytes() -> int:
    """Bytes in storages of all tensors that are alive, each storage once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors():
        if type(tensor) in (Tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.device.type == "cpu":
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _counts() -> tuple[int, int, int]:
    """Tensors, bytes, and all objects that the collector tracks."""
    return len(_tensors()), _nbytes(), len(gc.get_objects())


@STAGES
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", [None, "bf16", "bf16-lean"])
def test_training_steps_leave_nothing_behind(stage: int, accumulate: int, precision: str | None) -> None:
    """Peers leaked thousands of Python objects a step; here the count after step 8 is the count after step 23."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), stage, accumulate=accumulate, precision=precision)
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        batches = [part(batch, rank, 2) for batch in token_batches(2)] * accumulate
        seen = []
        for steps in (3, 5, 15):
            for _ in range(steps):
                train(model, optimizer, batches[:accumulate], accumulate=accumulate, clip=1.0)
            seen.append(_counts())
        assert seen[1][:2] == seen[2][:2]
        # What is under way and the interpreter's own caches move by a handful; a leak of one object a step would be 15.
        assert abs(seen[2][2] - seen[1][2]) < 12

    _run_apart(2, run)


@STAGES
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_evaluation_leaves_nothing_behind(stage: int, mode: str) -> None:
    """Also forwards with autograd on whose graph is dropped without a backward."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        batch = part(vector_batches(1)[0], rank, 2)
        train(model, SGD(model.parameters(), lr=0.1), [batch])
        context: Callable[[], Any] = torch.enable_grad if mode == "grad" else getattr(torch, mode)
        seen = []
        for forwards in (2, 4, 12):
            for _ in range(forwards):
                with context():
                    model(*batch)
            seen.append(_counts())
        assert seen[1][:2] == seen[2][:2]
        assert abs(seen[2][2] - seen[1][2]) < 10
        if stage == 3:
            # No unit is left whole: what is alive is slices.
            with onecopy.gathered(model):
                pass
            assert seen[2][1] == _nbytes()

    _run_apart(2, run)


@STAGES
def test_gathered_blocks_leave_nothing_behind(stage: int) -> None:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        seen = []
        for blocks in (2, 4, 4):
            for _ in range(blocks):
                with onecopy.gathered(model, write=True):
                    pass
            seen.append(_counts())
        assert seen[1][:2] == seen[2][:2]
        assert abs(seen[2][2] - seen[1][2]) < 10

    _run_apart(2, run)


@STAGES
def test_a_dropped_model_gives_its_memory_back(stage: int) -> None:
    """With hooks on the model, on optimizers and on autograd, nothing process-wide may hold it.

    But the slices of one, which other ranks may still read (`comm/presence.py`).
    """

    def run(rank: int) -> None:
        def once() -> None:
            model = onecopy.shard(seeded(Stack), stage)
            optimizer = AdamW(model.parameters(), lr=1e-3)
            train(model, optimizer, [part(batch, rank, 2) for batch in vector_batches(2)])
            del model, optimizer
            gc.collect()

        once()
        before = _counts()
        once()
        once()
        after = _counts()
        assert after[:2] == before[:2]
        assert sum(isinstance(thing, Stack) for thing in gc.get_objects()) == 0

    _run_apart(2, run)


def _plain_stack_bytes(layers: int, width: int) -> int:
    return sum(p.numel() for p in Stack(width, layers).parameters()) * 4


def test_two_thousand_steps_leave_no_object_behind() -> None:
    """Where all parameters lie in units below the root, so that nothing is gathered for the root itself."""

    def run(rank: int) -> None:
        model = onecopy.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3, units=["0", "1"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def steps(number: int) -> tuple[int, ...]:
            for _ in range(number):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return _counts()

        steps(10)
        before = steps(10)
        after = steps(2000)
        assert after[:2] == before[:2]
        assert abs(after[2] - before[2]) < 100

    def apart(rank: int) -> None:
        gc.collect()
        gc.freeze()
        run(rank)

    run_ranks(1, apart, group=False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stage_3_holds_its_slices_alone_between_steps(num_ranks: int) -> None:
    """Closed form: 4Ψ/N of parameters; with gradients and momentum 3 · 4Ψ/N; Ψ padded. Plus a batch and scalars."""

    def run(rank: int) -> None:
        batch = part(vector_batches(1, width=64)[0], rank, num_ranks)
        base = _nbytes()
        model = onecopy.shard(seeded(Stack, 64, 4), 3)
        share = onecopy.padded_numel(model) // num_ranks * 4
        assert _nbytes() - base == pytest.approx(share, abs=512)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        unit = max(sum(p.numel() for p in block.parameters()) for block in model.blocks) * 4
        # Staging is kept: for two reduces under way, N slices of the largest unit to send, N - 1 that come.
        staging = 2 * unit * (2 * num_ranks - 1) // num_ranks
        assert 3 * share <= _nbytes() - base <= 3 * share + staging + 2048

    _run_apart(num_ranks, run)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_give_the_originals_up(stage: int) -> None:
    """Closed form: whole parameters once (4Ψ) and slices (4Ψ/N): nobody keeps the parameters as they were built."""

    def run(rank: int) -> None:
        batch = part(vector_batches(1, width=64)[0], rank, 2)
        base = _nbytes()
        plain = seeded(Stack, 64, 4)
        held = list(plain.parameters())
        model = onecopy.shard(plain, stage)
        psi = onecopy.padded_numel(model) * 4
        assert _nbytes() - base <= psi / 2 + 1024
        with torch.no_grad():
            model(*batch)
        assert psi * 1.5 <= _nbytes() - base <= psi * 1.5 + 4096
        assert len(held) == len(list(model.parameters()))

    _run_apart(2, run)


class Watched(nn.Module):
    """A stack of wide blocks that reports the bytes alive while its last operation computes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(layers))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen.append(_nbytes())
            if x.requires_grad:
                x.register_hook(lambda gradient: self.seen.append(_nbytes()))
        return x.square().mean()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_peak_does_not_grow_with_depth(prefetch: int) -> None:
    """Over its slices a rank holds a constant number of whole units in forward and backward, whatever the depth.

    Forward: the unit that computes and those prefetched. Backward: two whole units and three outgoing gradients beside
    that (three reduces are under way at most) and their staging. A peer's extra bytes grew with depth.
    """

    def peak(rank: int, layers: int) -> tuple[float, float]:
        model = onecopy.shard(seeded(Watched, layers), 3, prefetch=prefetch)
        x = torch.ones(1, 96)
        unit = 96 * 97 * 4
        for _ in range(2):
            model.seen.clear()
            for parameter in model.parameters():
                parameter.grad = None
            base = _nbytes()
            with torch.no_grad():
                model(x)
            forward = max(model.seen) - base
            model.seen.clear()
            loss = model(x)
            loss.backward()
            grown = sum(p.grad.local.nbytes for p in model.parameters())
            both = max(model.seen) - base
            del loss
        assert grown > 0
        return forward / unit, both / unit

    for shallow, deep in _run_apart(2, lambda rank: (peak(rank, 6), peak(rank, 12))):
        # The gradients' slices grow as they must: half a unit for every block on two ranks.
        assert deep[0] == pytest.approx(shallow[0], abs=0.2)
        assert deep[1] - 12 / 2 == pytest.approx(shallow[1] - 6 / 2, abs=0.7)
        assert deep[0] <= 1 + prefetch + 0.3
