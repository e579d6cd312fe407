"""Steps: the loop's way through its steps, plainly or with recovery. The loop in `train.py` is the same for both.

`Events` are what happened to ranks meanwhile, as records for the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

import onecopy
from onecopy.recipes.config import Config
from onecopy.recipes.metrics import Record
from onecopy.resilience.losses import Repair
from onecopy.resilience.membership import Slow

T = TypeVar("T")


class Steps(Protocol):
    """What the loop needs of `onecopy.Run`."""

    @property
    def steps(self) -> int: ...

    @property
    def repairs(self) -> list[Repair]: ...

    @property
    def slow(self) -> list[Slow]: ...

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]: ...

    def attempts(self) -> Iterator[None]: ...

    def step(self, *values: float, update: bool = True) -> list[float]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> bool | None: ...


class PlainSteps:
    """Steps that nobody makes again."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.steps = 0
        self.repairs: list[Repair] = []
        self.slow: list[Slow] = []
        self._optimizers = optimizers
        self._nothing: AbstractContextManager[None] = nullcontext()

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]:
        """The batches."""
        yield from batches(0)

    def attempts(self) -> Iterator[None]:
        """Once."""
        yield

    def step(self, *values: float, update: bool = True) -> list[float]:
        """Step the optimizers."""
        for optimizer in self._optimizers if update else ():
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.steps += 1
        return list(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return None


def make_steps(config: Config, model: nn.Module, optimizers: Sequence[Optimizer], **kept: Any) -> Steps:
    """Steps as the config wants them.

    Args:
        optimizers: one, if the config asks for recovery.
        kept: what changes from step to step and all ranks have alike, for `onecopy.resilient`.
    """
    return onecopy.resilient(model, *optimizers, **kept) if config.recovery.is_on else PlainSteps(optimizers)


class Events:
    """Ranks that were lost or slow, each told once."""

    def __init__(self, run: Steps) -> None:
        self._run = run
        self._repairs = self._slow = 0

    def before(self, step: int) -> list[Record]:
        """Those since the last call, told with ``step``, the one that was made after them."""
        slow, repairs = self._run.slow[self._slow :], self._run.repairs[self._repairs :]
        self._slow, self._repairs = self._slow + len(slow), self._repairs + len(repairs)
        return [
            *(Record("slow", step, {"seconds": s.seconds, "given_up": float(s.given_up)}, (s.rank,)) for s in slow),
            *(Record("recovery", step, {"seconds": r.seconds, "lost_seconds": r.lost}, r.ranks) for r in repairs),
        ]
