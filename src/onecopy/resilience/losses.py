"""Losses: how the loss of a rank shows itself, and what is told of one that was made good."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from onecopy.errors import CollectiveError, UsageError
from onecopy.resilience.membership import Generation, Membership, membership

_A_MOMENT: Final = 0.5
"""Seconds in which the launcher tells of a loss that has shown itself as some other error first."""


@dataclass(frozen=True)
class Repair:
    """A loss of ranks that was made good, or a rank that came to make them more.

    Attributes:
        step: steps that were made when it came.
        ranks: that were lost.
        number: ranks from then on.
        joined: how many of them are new.
        since: Unix time in seconds from which work is lost: the begin of the attempt that is made again, or where the
            step was committed, the moment in which the first rank noticed the loss.
        began, met, settled: likewise: the loss was noticed here, the ranks had met, they had their slices.
    """

    step: int
    ranks: tuple[int, ...]
    number: int
    joined: int
    since: float
    began: float
    met: float
    settled: float

    @property
    def seconds(self) -> float:
        """From the loss until all ranks had their slices."""
        return self.settled - self.began

    @property
    def lost(self) -> float:
        """Seconds that the loss cost the job: `seconds`, and the work that is done over."""
        return self.settled - self.since

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        lost = f"lost rank{'s' if len(self.ranks) != 1 else ''} {ranks}"
        took = f"after {self.seconds:.2f} s"
        if len(self.ranks) == self.joined:
            return f"{lost if self.ranks else 'met anew'} after step {self.step}; back {took}"
        if not self.ranks:
            more = "a rank has" if self.joined == 1 else f"{self.joined} ranks have"
            return f"{more} joined after step {self.step}; {self.number} go on {took}"
        return f"{lost} after step {self.step}; {self.number} go on {took}"


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


def repaired(
    earlier: Generation | None, member: Membership, step: int, since: float, began: float, met: float
) -> Repair:
    """What has come of a loss since an earlier generation; it is made good now.

    Args:
        earlier: None on a newcomer, which knows of nothing before it.
    """
    now = member.now
    assert now is not None
    lost: tuple[int, ...]
    if earlier is None:
        lost, joined = () if member.makes_more else (now.members.index(member.process),), 1
    else:
        lost = tuple(number for number, process in enumerate(earlier.members) if process not in now.members)
        joined = sum(process not in earlier.members for process in now.members)
    return Repair(step, lost, len(now.members), joined, since, began, met, time.time())
