"""One collective under way: a program of messages that the calling thread moves forward.

A transport (`transport.py`) writes each collective as a generator that posts messages and yields the work to wait
for. `Collective` runs it: to the first wait when it is issued, on to the next at each `advance`, to the end at
`finish`. That keeps every wait in one place, which knows the time limit and can say who is missing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Final, NamedTuple, NoReturn, Protocol

from onecopy.comm.cross_memory import Fetch, Offer
from onecopy.comm.mailbox import Disagreement, PeerGone
from onecopy.comm.patience import patience
from onecopy.errors import CollectiveError, CollectiveTimeout
from onecopy.observe.ledger import Ledger
from onecopy.observe.stalls import Stall

_THROUGH_MEMORY: Final = (Offer, Fetch)
_A_LOOK: Final = timedelta(milliseconds=10)


class PeerUnreachable(RuntimeError):
    """A message could not even be posted: the connection to ``rank`` is broken."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is unreachable")
        self.rank = rank


class Work(Protocol):
    """What torch.distributed returns for an asynchronous call."""

    def wait(self, timeout: timedelta = ...) -> object: ...


class Watcher(Protocol):
    """What a `Monitor` (`monitor.py`) is told."""

    def come_to(self, subject: str) -> int: ...

    def watch(self, number: int, subject: str, underway: Stall) -> None: ...


class Posted(NamedTuple):
    """A message under way and the rank at its other end (None: all of them)."""

    work: Work
    peer: int | None


Program = Generator[Sequence[Posted]]
"""A collective's messages: each item is what must arrive, or be gone, before the program may go on."""


class Label(NamedTuple):
    """What a collective is for, as the ledger and an error message name it."""

    op: str
    unit: str
    axis: str


class Collective:
    """A collective that was issued and may not have finished.

    Args:
        program: the messages, already bound to their buffers.
        label: its name in the ledger and in errors.
        sent: bytes that this rank sends.
        ledger: where it is booked when it finishes, under the phase in which it was issued.
        monitor: told of it, where it runs on a device.

    Raises:
        CollectiveTimeout: from any method, when a message did not arrive within the process group's time limit.
        CollectiveError: from any method, when a peer's connection broke.
    """

    def __init__(
        self, program: Program, label: Label, sent: int, ledger: Ledger, monitor: Watcher | None = None
    ) -> None:
        self._program = program
        self._label = label
        self._sent = sent
        self._ledger = ledger
        self._phase = ledger.phase
        self._issued = perf_counter()
        self._exposed = 0.0
        self._stalls: list[Stall] = []
        self._monitor = monitor
        self._number = 0 if monitor is None else monitor.come_to(self._subject)
        self._posted: Sequence[Posted] | None = None
        self._step()

    @property
    def done(self) -> bool:
        return self._posted is None

    def advance(self) -> bool:
        """Wait for the messages posted so far and post the next ones. Returns whether all is done."""
        if self._posted is not None:
            start = perf_counter()
            self._wait(self._posted)
            if (timeline := self._ledger.timeline) is not None:
                timeline.add(
                    f"wait for {self._label.op} {self._label.unit}",
                    "wait",
                    self._ledger.phase,
                    self._label.unit,
                    start,
                    perf_counter(),
                )
            self._step(start)
        return self.done

    def advance_if_ready(self) -> bool:
        """As `advance`, if nothing has to be waited for. Returns whether it moved on.

        That is known of messages through memory alone, and NCCL's calls must not be made whenever a rank is ready.
        """
        for posted in self._posted or ():
            if not isinstance(posted.work, _THROUGH_MEMORY) or not posted.work.has_come():
                return False
        if self._posted:
            self.advance()
            return True
        return False

    def finish(self) -> None:
        """Wait until the collective is done."""
        while not self.advance():
            pass

    def _step(self, start: float | None = None) -> None:
        start = perf_counter() if start is None else start
        try:
            self._posted = next(self._program)
        except StopIteration:
            self._posted = None
        except RuntimeError as error:
            self._posted = None
            raise self._failure(error, {error.rank} if isinstance(error, PeerUnreachable) else set()) from error
        now = perf_counter()
        self._exposed += now - start
        if self._posted is None:
            self._ledger.record(
                self._label.op,
                self._label.unit,
                self._label.axis,
                phase=self._phase,
                sent=self._sent,
                seconds=now - self._issued,
                exposed=0.0 if self._stalls else self._exposed,
                stalls=self._stalls,
            )
            if (timeline := self._ledger.timeline) is not None:
                timeline.add_collective(self._label.op, self._phase, self._label.unit, self._issued, now, self._sent)

    def _wait(self, messages: Sequence[Posted]) -> None:
        for position, posted in enumerate(messages):
            try:
                in_vain = not getattr(posted.work, "is_served", False)
                with patience(self._waits_for, posted.peer, may_be_in_vain=in_vain):
                    posted.work.wait()
                if (stall := getattr(posted.work, "stall", None)) is not None:
                    self._stalls.append(stall)
                    if self._monitor is not None:
                        self._monitor.watch(self._number, self._subject, stall)
            except RuntimeError as error:
                self._posted = None
                self._fail(error, messages[position:])

    def _waits_for(self, peer: object) -> str:
        return f"{self._subject}: no answer from {'its peers' if peer is None else f'rank {peer}'}"

    def _fail(self, error: RuntimeError, unfinished: Sequence[Posted]) -> NoReturn:
        """Name the failure. Those after the first were never waited for: have a look whether they are missing too."""
        missing = {unfinished[0].peer}
        if isinstance(error, PeerGone) and error.rank is not None:
            raise self._failure(error, {error.rank}) from error
        for posted in unfinished[1:]:
            try:
                if posted.peer not in missing:
                    posted.work.wait(_A_LOOK)
            except RuntimeError:
                missing.add(posted.peer)
        raise self._failure(error, {peer for peer in missing if peer is not None}) from error

    @property
    def _subject(self) -> str:
        subject = f"{self._label.op} of unit {self._label.unit!r}" if self._label.unit else self._label.op
        return f"{subject} in {self._phase} over the {self._label.axis} axis"

    def _failure(self, error: RuntimeError, ranks: set[int]) -> CollectiveError:
        who = f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, sorted(ranks)))}" if ranks else "its peers"
        what = self._subject
        waited = perf_counter() - self._issued
        if isinstance(error, Disagreement):
            return CollectiveError(f"{what}: {who} cannot be read: {error}.")
        if "imed out" in str(error) or "imeout" in str(error):
            return CollectiveTimeout(
                f"{what}: no answer from {who} within {waited:.1f} s. Every rank must run the same number of forward "
                f"and backward passes; look there for an error, or raise the process group's timeout."
            )
        return CollectiveError(
            f"{what}: the connection to {who} broke after {waited:.1f} s. That rank has most likely ended; "
            f"its own output says why."
        )
