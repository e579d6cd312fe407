"""The arena: regions by lifetime. Oracle: a model of a caching allocator, which holds everything in one heap."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import TinyGPT, seeded, token_batches
from onecopy.activations import Activations
from onecopy.memory.arena import Arena
from oracle import OPTIMIZERS, assert_trains_like_twin, part, train
from ranks import run_ranks

KIB = 1024


class _Heap:
    """What a caching allocator does with one pool: best fit among holes, neighbours joined, grown at its end."""

    def __init__(self) -> None:
        self.size = 0
        self.holes: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        fitting = [start for start, size in self.holes.items() if size >= nbytes]
        if not fitting:
            start = self.size
            if self.holes and (last := max(self.holes)) + self.holes[last] == self.size:
                start = last
                del self.holes[last]
            self.size = start + nbytes
            return start
        start = min(fitting, key=lambda s: self.holes[s])
        left = self.holes.pop(start) - nbytes
        if left:
            self.holes[start + nbytes] = left
        return start

    def free(self, start: int, nbytes: int) -> None:
        if start + nbytes in self.holes:
            nbytes += self.holes.pop(start + nbytes)
        for before, size in list(self.holes.items()):
            if before + size == start:
                del self.holes[before]
                start, nbytes = before, size + nbytes
        self.holes[start] = nbytes


WORKING = [(4 + layer) * 8 * KIB for layer in range(24)]
"""Bytes that each layer needs while it computes, growing, as they do with a sequence that grows from batch to batch."""

KEPT = WORKING
"""Bytes of the checkpoint that each layer leaves behind."""


def test_one_heap_is_torn_to_pieces_and_two_regions_are_not() -> None:
    """Reserved bytes against the largest sum that is alive at once."""
    most = max(working + sum(KEPT[: layer + 1]) for layer, working in enumerate(WORKING))

    heap = _Heap()
    for working, kept in zip(WORKING, KEPT, strict=True):
        start = heap.take(working)
        heap.take(kept)
        heap.free(start, working)
    assert heap.size > 1.7 * most
    assert sum(heap.holes.values()) > 0.3 * heap.size, "a third is free, as where ZeRO §3.2 saw memory run out"
    assert max(heap.holes.values()) == WORKING[-1], "and in no piece for a larger layer"

    arena, short, checkpoints = Arena(chunk_bytes=sum(KEPT)), _Heap(), []
    for working, kept in zip(WORKING, KEPT, strict=True):
        start = short.take(working)
        checkpoints.append(arena.empty("checkpoints", kept // 4, torch.float32, torch.device("cpu")))
        short.free(start, working)
    region = arena.region("checkpoints")
    assert region.reserved == region.used == sum(KEPT)
    assert short.size + region.reserved == most
    addresses = [tensor.data_ptr() - checkpoints[0].data_ptr() for tensor in checkpoints]
    assert addresses == [sum(KEPT[:layer]) for layer in range(24)], "one after the other"


def test_pieces_never_overlap_and_all_come_back() -> None:
    """A thousand tensors of random sizes, of which some live longer than others, also through views alone."""
    arena, chance = Arena(chunk_bytes=64 * KIB), random.Random(5)
    alive: list[tuple[Tensor, int]] = []
    for number in range(1000):
        numel = chance.randrange(1, 3000)
        tensor = arena.empty("gradients", numel, chance.choice([torch.float32, torch.bfloat16]), torch.device("cpu"))
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number % 251)
        alive.append((tensor[numel // 2 :], number % 251))
        del tensor
        while len(alive) > 40:
            alive.pop(chance.randrange(len(alive)))
        assert all((view == value).all() for view, value in alive[::7])
    region = arena.region("gradients")
    assert region.used <= region.reserved <= 40 * 12 * KIB + 64 * KIB
    alive.clear()
    gc.collect()
    assert region.used == 0


def test_regions_are_apart() -> None:
    arena = Arena(chunk_bytes=4 * KIB)
    spans = []
    for name in ("gradients", "checkpoints"):
        made = [arena.empty(name, 200, torch.float32, torch.device("cpu")) for _ in range(8)]
        spans.append((min(t.data_ptr() for t in made), max(t.data_ptr() + t.nbytes for t in made)))
        del made
    assert arena.region("gradients").reserved == arena.region("checkpoints").reserved == 8 * KIB
    assert arena.region("gradients") is not arena.region("checkpoints")


@pytest.mark.parametrize("stage, precision", [*((n, None) for n in range(4)), (0, "bf16-lean"), (2, "bf16-lean")])
def test_training_in_an_arena_changes_no_bit(stage: int, precision: str | None) -> None:
    """Gradients and checkpoints lie in regions of their own, which hold no more after ten steps than after two."""

    def weights(rank: int, defragment: bool) -> tuple[dict[str, Tensor], list[int]]:
        model = onecopy.shard(
            seeded(TinyGPT), stage, activations=Activations(), defragment=defragment, precision=precision
        )
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        arena, reserved = onecopy.arena(model), []
        for batch in token_batches(10):
            train(model, optimizer, [part(batch, rank, 2)])
            if arena is not None:
                reserved.append(sum(arena.region(name).reserved for name in ("gradients", "checkpoints")))
        if arena is not None:
            # The gradients are dropped and the graph is gone.
            assert arena.region("checkpoints").used == 0
            assert arena.region("gradients").used == 0
        with onecopy.gathered(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}, reserved

    plain = run_ranks(2, weights, False)[0][0]
    for found, reserved in run_ranks(2, weights, True):
        assert reserved[0] == reserved[-1] > 0
        for name, value in plain.items():
            assert torch.equal(found[name], value), name


def test_gradients_lie_in_the_arena() -> None:
    def run(rank: int) -> None:
        model = onecopy.shard(nn.Linear(8, 8), 2, defragment=True)
        arena = onecopy.arena(model)
        assert arena is not None
        model(torch.ones(1, 8)).sum().backward()
        slices = onecopy.meter(model).live["gradients_sliced"]
        assert arena.region("gradients").used == pytest.approx(slices, abs=64)
        model.zero_grad()
        assert arena.region("gradients").used == 0

    run_ranks(2, run)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_kept_between_micro_batches_lie_there_too(stage: int) -> None:
    """They live longest of all: until the step's last micro-batch. Oracle: the meter, which counts each by itself."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), stage, accumulate=2, defragment=True)
        arena, meter = onecopy.arena(model), onecopy.meter(model)
        assert arena is not None
        batches = [part(batch, rank, 2) for batch in token_batches(4)]
        model(*batches[0]).backward()
        assert arena.region("gradients").used == pytest.approx(meter.live["gradients_whole"], abs=64 * 3) != 0
        model(*batches[1]).backward()
        assert arena.region("gradients").used == pytest.approx(meter.live["gradients_sliced"], abs=64 * 3) != 0
        assert_trains_like_twin(
            rank, 2, lambda: seeded(TinyGPT), token_batches(4), stage=stage, accumulate=2, defragment=True
        )

    run_ranks(2, run)
