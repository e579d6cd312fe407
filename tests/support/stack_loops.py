"""Training loops of a test's own on a `Stack`, at any stage and number of ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from models import Stack, seeded, vector_batches
from one_fork import On
from oracle import Mine, assert_loop_like_twin, part, train


def stack() -> nn.Module:
    return seeded(Stack)


def step(model: nn.Module, rank: int, num_ranks: int, optimizer: Optimizer | None = None) -> None:
    """One step of a `Stack` on this rank's rows."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    train(model, optimizer, [part(vector_batches(1)[0], rank, num_ranks)])


def check(stage: int, num_ranks: int, loop: Callable[[nn.Module, Mine], Any], **settings: Any) -> On:
    """Holds ``loop`` on sharded ranks against itself on one process; ``settings`` are `onecopy.shard`'s."""

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, stack, stage=stage, **settings)

    return On(num_ranks, run)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)
