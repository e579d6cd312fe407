"""Losses: how the loss of a rank shows itself, and what is told of one that was made good."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from onecopy.errors import CollectiveError, UsageError
from onecopy.resilience.membership import Generation, membership

_A_MOMENT: Final = 0.5
"""Seconds in which the launcher tells of a loss that has shown itself as some other error first."""


@dataclass(frozen=True)
class Repair:
    """A loss of ranks that was made good.

    Attributes:
        step: steps that were made when it came.
        ranks: that were replaced.
        began, met, settled: Unix times in seconds: the loss was noticed here, the ranks had met, they had their slices.
    """

    step: int
    ranks: tuple[int, ...]
    began: float
    met: float
    settled: float

    @property
    def seconds(self) -> float:
        """From the loss until all ranks had their slices."""
        return self.settled - self.began

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        which = f"rank{'s' if len(self.ranks) != 1 else ''} {ranks}"
        return f"lost {which} after step {self.step}; back after {self.seconds:.2f} s"


def is_loss(error: BaseException) -> bool:
    """Whether a rank is lost; shown by an error of a collective, or known from the launcher within a moment."""
    member = membership()
    if member is None or member.now is None or not isinstance(error, RuntimeError):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CollectiveError):
            return True
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, UsageError):
        return False
    until = time.monotonic() + _A_MOMENT
    while time.monotonic() < until:
        if member.newest > member.now.number:
            return True
        time.sleep(0.005)
    return False


def lost_between(earlier: Generation, now: Generation) -> tuple[int, ...]:
    """The ranks of a generation whose processes are not in a later one."""
    return tuple(rank for rank, process in enumerate(earlier.members) if process not in now.members)
