"""Steps: the loop's way through its steps, plainly or with recovery. The loop in `train.py` is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

import onecopy
from onecopy.recipes.config import Config
from onecopy.resilience.run import Repair

T = TypeVar("T")


class Steps(Protocol):
    """What the loop needs of `onecopy.Run`."""

    steps: int
    repairs: list[Repair]

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]: ...

    def attempts(self) -> Iterator[None]: ...

    def step(self, *values: float, update: bool = True) -> list[float]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> bool | None: ...


class PlainSteps:
    """Steps that nobody makes again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps = 0
        self.repairs: list[Repair] = []
        self._optimizer = optimizer
        self._nothing: AbstractContextManager[None] = nullcontext()

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]:
        """The batches."""
        yield from batches(0)

    def attempts(self) -> Iterator[None]:
        """Once."""
        yield

    def step(self, *values: float, update: bool = True) -> list[float]:
        """Step the optimizer."""
        if update:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return list(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return None


def make_steps(config: Config, model: nn.Module, optimizer: Optimizer, **kept: Any) -> Steps:
    """Steps as the config wants them.

    Args:
        kept: what changes from step to step and all ranks have alike, for `onecopy.resilient`.
    """
    return onecopy.resilient(model, optimizer, **kept) if config.recovery.is_on else PlainSteps(optimizer)
