"""Training loops of a test's own on a `Stack`, at any stage and number of ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from models import Stack, seeded
from one_fork import On
from oracle import Mine, assert_loop_like_twin


def stack() -> nn.Module:
    return seeded(Stack)


def check(stage: int, num_ranks: int, loop: Callable[[nn.Module, Mine], Any], **settings: Any) -> On:
    """Holds ``loop`` on sharded ranks against itself on one process; ``settings`` are `onecopy.shard`'s."""

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, stack, stage=stage, **settings)

    return On(num_ranks, run)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)
