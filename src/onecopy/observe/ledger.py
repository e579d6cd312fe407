"""The ledger: a record of every collective, by operation, phase, unit and mesh axis.

Collectives write to it as they finish (`collective.py`); the optimizer's step closes a page. Entries are sums,
so that a ledger's size depends on the model and not on how long it trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from onecopy.observe.stalls import Stall
from onecopy.observe.timeline import Timeline

Phase = Literal["setup", "load", "forward", "backward", "step", "save"]

STATE_OPERATIONS: Final = ("all_gather", "reduce_scatter", "all_reduce")
"""The operations that carry model states, whose volume ZeRO §7 gives; all others are small control messages."""


@dataclass(frozen=True)
class Entry:
    """The sum of all collectives of one kind.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce"; or "activations", an activation checkpoint made whole over the
            tensor axis; or a control message: "agree", "norm", "overflow", "barrier"; or "broadcast", values of one
            rank for all.
        phase: what the model was doing: "setup" (`onecopy.shard`), "load", "forward", "backward", "step" or "save".
        unit: the unit whose parameters or gradients were sent; "" for control messages.
        axis: the mesh axis.
        calls: how many there were.
        bytes_sent: payload bytes that this rank handed to the transport for other ranks.
        seconds: time from issue to completion, summed over calls. Time that computing hides is included.
        exposed: the part of ``seconds`` in which the calling thread waited or summed. On a device: in which the
            computing stream stood still, as far as the device has come.
    """

    op: str
    phase: Phase
    unit: str
    axis: str
    calls: int
    bytes_sent: int
    seconds: float
    exposed: float


class Traffic:
    """What was sent in a span of time: one step, or all of the training."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Phase, str, str], list[float]] = {}

    @property
    def entries(self) -> list[Entry]:
        """One entry for each (op, phase, unit, axis) seen, in order of first use."""
        return [
            Entry(*key, calls=int(calls), bytes_sent=int(sent), seconds=seconds, exposed=exposed)
            for key, (calls, sent, seconds, exposed) in self._sums.items()
        ]

    def bytes_sent(
        self,
        op: str | None = None,
        phase: Phase | None = None,
        unit: str | None = None,
        axis: str | None = None,
    ) -> int:
        """Bytes sent by this rank in the entries that match every filter given."""
        wanted = (op, phase, unit, axis)
        return sum(
            int(sums[1])
            for key, sums in self._sums.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    @property
    def calls(self) -> int:
        """Collectives that this rank took part in."""
        return sum(int(calls) for calls, *_ in self._sums.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of model states sent: what ZeRO §7 counts, without control messages and set-up."""
        return sum(
            int(sums[1])
            for (op, phase, _, _), sums in self._sums.items()
            if op in STATE_OPERATIONS and phase != "setup"
        )

    def table(self) -> str:
        """The entries as lines of text, widest traffic first."""
        head = f"{'op':<15}{'phase':<10}{'axis':<11}{'calls':>7}{'bytes sent':>15}{'seconds':>10}{'exposed':>10}  unit"
        rows = [
            f"{e.op:<15}{e.phase:<10}{e.axis:<11}{e.calls:>7}{e.bytes_sent:>15,}{e.seconds:>10.4f}{e.exposed:>10.4f}"
            f"  {e.unit}"
            for e in sorted(self.entries, key=lambda entry: -entry.bytes_sent)
        ]
        return "\n".join([head, *rows])

    def _with(self, later: Traffic) -> Traffic:
        """What was sent in both."""
        both = Traffic()
        for traffic in (self, later):
            for key, (calls, sent, seconds, exposed) in traffic._sums.items():
                both._add(key, int(sent), seconds, exposed, int(calls))
        return both

    def _add(self, key: tuple[str, Phase, str, str], sent: int, seconds: float, exposed: float, calls: int = 1) -> None:
        sums = self._sums.setdefault(key, [0, 0, 0.0, 0.0])
        sums[0] += calls
        sums[1] += sent
        sums[2] += seconds
        sums[3] += exposed


class Ledger:
    """The record of everything that one sharded model sends.

    Attributes:
        phase: what the model is doing now; the schedule sets it.
        current: traffic since the last optimizer step.
        last_step: traffic of the last whole step, None before the first.
        total: traffic since `onecopy.shard`, set-up included.
        timeline: single events too, while a profile is taken.
    """

    def __init__(self) -> None:
        self.phase: Phase = "setup"
        self.current = Traffic()
        self.last_step: Traffic | None = None
        self.total = Traffic()
        self.timeline: Timeline | None = None
        # In the order in which the device comes to them.
        self._stalls: deque[tuple[Stall, tuple[str, Phase, str, str], Traffic]] = deque()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Book what is issued inside the block under ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def record(
        self,
        op: str,
        unit: str,
        axis: str,
        *,
        phase: Phase,
        sent: int,
        seconds: float,
        exposed: float,
        stalls: Sequence[Stall] = (),
    ) -> None:
        """Book one finished collective: ``sent`` in bytes, the times in seconds, and what a device will say of it."""
        key = (op, phase, unit, axis)
        for traffic in (self.current, self.total):
            traffic._add(key, sent, seconds, exposed)
        self._stalls.extend((stall, key, self.current) for stall in stalls)
        while self._stalls and self._stalls[0][0].is_over:
            stall, key, page = self._stalls.popleft()
            for traffic in (page, self.total):
                traffic._add(key, 0, 0.0, stall.seconds, calls=0)

    def close_step(self) -> None:
        """Turn the page: what was current becomes the last step.

        What an optimizer sends right after another's step belongs to the same one.
        """
        if self.last_step is not None and all(phase == "step" for _, phase, _, _ in self.current._sums):
            self.last_step = self.last_step._with(self.current)
        else:
            self.last_step = self.current
        self.current = Traffic()
