"""The timeline: when each collective and each unit's computation ran, for one profiled stretch of training.

The ledger holds one only while a profile is taken; otherwise nothing is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

Lane = Literal["compute", "gather", "reduce", "wait"]

_LANES: dict[str, Lane] = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "activations": "gather",
}


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        name: what a reader sees.
        lane: "compute" (forward or backward of a unit, or the step), "gather", "reduce", or "wait": the calling thread
            stood still for a collective.
        phase: "setup", "forward", "backward" or "step".
        unit: the unit concerned, "" for none.
        start: seconds since the profile began.
        end: likewise.
        bytes: sent by this rank.
    """

    name: str
    lane: Lane
    phase: str
    unit: str
    start: float
    end: float
    bytes: int = 0


@dataclass
class Timeline:
    """Events in the order in which they ended.

    Attributes:
        began: `perf_counter()` at time zero.
    """

    began: float = field(default_factory=perf_counter)
    events: list[Event] = field(default_factory=list)

    def add(self, name: str, lane: Lane, phase: str, unit: str, start: float, end: float, sent: int = 0) -> None:
        """Record an event; ``start`` and ``end`` are `perf_counter()` values."""
        self.events.append(Event(name, lane, phase, unit, start - self.began, end - self.began, sent))

    def add_collective(self, op: str, phase: str, unit: str, start: float, end: float, sent: int) -> None:
        """Record a collective, from issue to completion; control messages are left out."""
        if op in _LANES:
            self.add(f"{op} {unit}", _LANES[op], phase, unit, start, end, sent)
