"""Communication buffers of constant size (ZeRO §6.2, C_B): bounded by `bucket_bytes`, whatever the model's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import SettingsError
from oracle import OPTIMIZERS, assert_trains_like_twin, part, train
from ranks import run_ranks


def _buffers(rank: int, num_ranks: int, stage: int, bucket_bytes: int, size: dict[str, int]) -> int:
    """Most bytes of communication buffers in two steps."""
    model = onecopy.shard(seeded(Stack, **size), stage, bucket_bytes=bucket_bytes)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = vector_batches(2, width=size["width"])
    train(model, optimizer, [part(batch, rank, num_ranks) for batch in batches])
    meter = onecopy.meter(model)
    return max(peak["communication"] for peak in meter.peaks.values())


FULL = [(0, 3), (1, 2), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    "stage, num_ranks",
    [(0, 2), (1, 3), (2, 2), (3, 3), *(pytest.param(s, n, marks=pytest.mark.full) for s, n in FULL)],
)
def test_buffers_do_not_grow_with_the_model(stage: int, num_ranks: int) -> None:
    """Units of 9 KiB and 37 KiB, and six of them or twelve, through buffers of 2 KiB, for two reduces at a time."""
    sizes = [{"width": 24, "layers": 6}, {"width": 48, "layers": 6}, {"width": 48, "layers": 12}]
    found = [run_ranks(num_ranks, _buffers, num_ranks, stage, 2048, size) for size in sizes]
    assert all(0 < nbytes <= 2 * 2048 for ranks in found for nbytes in ranks)


@one_fork
def test_the_bound_is_an_upper_one() -> Forked:
    """A small model gets small buffers: a unit here has 430 parameters, of which a peer sends half, for two reduces."""
    for nbytes in (yield On(2, _buffers, 2, 2, 1 << 40, {"width": 10, "layers": 3})):
        assert 0 < nbytes <= 2 * 3 * 4 * 230


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 4096])
@one_fork
def test_pieces_of_any_size_train_like_one_process(stage: int, bucket_bytes: int) -> Forked:
    def run(rank: int) -> None:
        settings: dict[str, Any] = {"stage": stage, "bucket_bytes": bucket_bytes, "clip": 0.5}
        steps = 1 if bucket_bytes == 1 else 3
        assert_trains_like_twin(rank, 2, lambda: seeded(TinyGPT), token_batches(steps), **settings)

    yield On(2, run)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_a_bf16_wire_is_summed_in_fp32_whatever_the_pieces(bucket_bytes: int) -> None:
    def run(rank: int) -> list[torch.Tensor]:
        model = onecopy.shard(seeded(TinyGPT), 2, precision="bf16", bucket_bytes=bucket_bytes)
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in token_batches(2)])
        with onecopy.gathered(model):
            return [p.detach().clone() for p in model.parameters()]

    whole = run_ranks(2, lambda rank: _default(rank))[0]
    assert all(torch.equal(a, b) for a, b in zip(run_ranks(2, run)[0], whole, strict=True))


def _default(rank: int) -> list[torch.Tensor]:
    model = onecopy.shard(seeded(TinyGPT), 2, precision="bf16")
    train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in token_batches(2)])
    with onecopy.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def test_a_size_that_cannot_be_is_refused() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(SettingsError, match="bucket_bytes must be a whole number"):
            onecopy.shard(Stack(), 2, bucket_bytes=wrong)  # type: ignore[arg-type]
