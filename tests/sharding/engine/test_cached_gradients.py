"""GradCache: the model runs without a graph first, and its forwards and backwards run inside the loss's backward.

As the cached losses of SentenceTransformers do. Oracle: one process, with the mean of both ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import seeded
from one_fork import Forked, On, one_fork
from oracle import assert_same_weights, gathered_weights, whole_weights

STEPS = 2


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def cached_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss over all rows, whose backward runs the model two rows at a time."""
    parts = batch.split(2)
    with torch.no_grad():
        outputs = [model(part).requires_grad_() for part in parts]
    every = torch.cat(outputs)
    loss = (every @ every.T).log_softmax(-1).diagonal().mean().neg()
    loss.backward()

    def in_parts(scale: Tensor) -> None:
        with torch.enable_grad():
            for part, output in zip(parts, outputs, strict=True):
                assert output.grad is not None
                ((model(part) * output.grad).sum() * scale).backward()

    leaf = loss.detach().requires_grad_()
    leaf.register_hook(in_parts)
    return leaf * 1


def make() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def plain_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train_like_twin(rank: int, stage: int, losses: Sequence[Callable[[nn.Module, Tensor], Tensor]]) -> None:
    """Train a sharded model with a loss for each step, and hold its weights against those of one process."""
    twin, model = seeded(make), onecopy.shard(seeded(make), stage, units=["0", "1", "2"])
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (twin, model))
    for step, loss in enumerate(losses):
        for other in range(2):
            (loss(twin, rows(step, other)) / 2).backward()
        loss(model, rows(step, rank)).backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(gathered_weights(model), whole_weights(twin))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_forwards_and_backwards_inside_a_backward_train_like_twin(stage: int) -> Forked:
    yield On(2, lambda rank: train_like_twin(rank, stage, [cached_loss] * STEPS))


@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_a_usual_step_follows_a_cached_one(stage: int) -> Forked:
    """What one backward left to its end, the next sends as it comes."""
    yield On(2, lambda rank: train_like_twin(rank, stage, [plain_loss, cached_loss, plain_loss]))
