"""Activation checkpoints on a sharded model: same numbers, and no unit gathered twice for them.

The oracle is the whole-batch twin without checkpoints.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
from models import seeded, vector_batches
from one_fork import Forked, On, one_fork
from oracle import (
    OPTIMIZERS,
    assert_trains_like_twin,
    gathered_weights,
    part,
    train,
)
from ranks import every_stage


class Checkpointed(nn.Module):
    """Blocks run through `checkpoint`, called by the model or by the block itself."""

    def __init__(self, reentrant: bool | None, inside: bool = False) -> None:
        super().__init__()
        kind = InsideCheckpoint if inside else nn.Sequential
        self.entry = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(
            kind(nn.Linear(10, 20), nn.Tanh(), nn.Dropout(0.0), nn.Linear(20, 10)) for _ in range(3)
        )
        self.head = nn.Linear(10, 3)
        self.reentrant = reentrant
        for block in self.blocks:
            block.reentrant = reentrant if inside else None
        self.outside = reentrant is not None and not inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.outside else block(x))
        return F.mse_loss(self.head(x), y)


class InsideCheckpoint(nn.Sequential):
    """A block that checkpoints its own inside."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@every_stage
@REENTRANT
@pytest.mark.parametrize("inside", [False, True], ids=["around the block", "inside the block"])
@one_fork
def test_checkpoints_train_like_twin_without(reentrant: bool, inside: bool, stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank,
            num_ranks,
            lambda: seeded(Checkpointed, reentrant, inside),
            vector_batches(4),
            stage=stage,
            accumulate=2,
            twin=lambda: seeded(Checkpointed, None, inside),
        )

    yield On(num_ranks, run)


@every_stage
@REENTRANT
@pytest.mark.parametrize("frozen", ["weight", "bias", "blocks.0", "blocks.1"])
@one_fork
def test_checkpoints_with_frozen_parameters(frozen: str, reentrant: bool, stage: int, num_ranks: int) -> Forked:
    """A peer's fault: saved shape against recomputed shape, for a frozen weight released in between."""

    def build(kind: bool | None) -> nn.Module:
        model = seeded(Checkpointed, kind)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        # A reentrant checkpoint gives no gradients at all when no input of its block requires one.
        model.entry.requires_grad_(True)
        return model

    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank,
            num_ranks,
            lambda: build(reentrant),
            vector_batches(3),
            stage=stage,
            twin=lambda: build(None),
        )

    yield On(num_ranks, run)


@REENTRANT
@pytest.mark.parametrize("stage", [1, 2, 3])
@one_fork
def test_a_checkpointed_step_sends_no_more_than_a_plain_one(stage: int, reentrant: bool) -> Forked:
    """Recomputing needs the parameters at the moment at which backward needs them: one gather serves both."""

    def sent(rank: int, kind: bool | None) -> int:
        model = onecopy.shard(seeded(Checkpointed, kind), stage)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, 2) for batch in vector_batches(3)])
        step = onecopy.ledger(model).last_step
        assert step is not None
        return step.state_bytes

    for plain, checkpointed in (yield On(2, lambda rank: (sent(rank, None), sent(rank, reentrant)))):
        assert checkpointed == plain


@pytest.mark.parametrize("num_ranks", [2, 3])
@REENTRANT
@one_fork
def test_a_checkpoint_over_several_units(num_ranks: int, reentrant: bool) -> Forked:
    """One checkpoint around two blocks, and one nested in it."""

    class Wide(Checkpointed):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.entry(x)
            if self.reentrant is None:
                for block in self.blocks:
                    x = x + block(x)
                return F.mse_loss(self.head(x), y)

            def pair(x: Tensor) -> Tensor:
                x = x + self.blocks[0](x)
                return x + checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)

            x = checkpoint(pair, x, use_reentrant=self.reentrant)
            return F.mse_loss(self.head(x + self.blocks[2](x)), y)

    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            assert_trains_like_twin(
                rank,
                num_ranks,
                lambda: seeded(Wide, reentrant),
                vector_batches(3),
                stage=stage,
                twin=lambda: seeded(Wide, None),
            )

    yield On(num_ranks, run)


@REENTRANT
@one_fork
def test_two_checkpointed_forwards_before_one_backward(reentrant: bool) -> Forked:
    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            twin, model = seeded(Checkpointed, None), onecopy.shard(seeded(Checkpointed, reentrant), stage)
            expected, optimizer = (OPTIMIZERS["sgd"](m.parameters()) for m in (twin, model))
            for a, b in zip(*[iter(vector_batches(4))] * 2, strict=True):
                (twin(*a) + twin(*b)).backward()
                (model(*part(a, rank, 2)) + model(*part(b, rank, 2))).backward()
                for o in (expected, optimizer):
                    o.step()
                    o.zero_grad()
            for name, value in gathered_weights(model).items():
                torch.testing.assert_close(value, twin.get_parameter(name).detach(), rtol=0, atol=1e-6)

    yield On(2, run)
