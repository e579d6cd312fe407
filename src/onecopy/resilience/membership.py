"""Membership: which processes are the ranks of which generation, as the launcher has written it into its store.

A **generation** is a set of processes that make process groups together. The launcher (`launcher.py`) writes a new one
when a process has ended, when a heartbeat stays away, and when a rank asks for one because its meeting failed. What
lies in the store, below the number of the attempt:

    generation/G      its members, in the order of ranks     here/G        how many have come to the meeting
    place/PROCESS     the generation in which it begins      ask/G         G cannot go on: a next one is asked for
    beat/PROCESS      counts up while it runs                done/PROCESS  its program has come to its end
    begun             how many hold their slices             failed/PROCESS  the words with which it ended
    hopeless          why peers' memory is not enough: all begin anew from a checkpoint
    over              an exit code: all end, for a reason that would come again
    ready/PROCESS     its script has come to its loop, and it is in no generation yet
    more/G            there are such, and the ranks of G may let them in between two steps
    slow/I            the I-th time that a rank was slow: it did not answer for a while
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from onecopy.errors import CollectiveError
from onecopy.resilience.cutting import Cutter

ADDRESS: Final = "ONECOPY_RUN_STORE"
"""Environment variable: host and port of the launcher's store, the attempt, this process's name, seconds a beat."""

_FOR_EVER: Final = timedelta(days=365)
_A_MOMENT: Final = 0.25
"""Seconds that the launcher gets to notice a loss by itself before it is asked."""

_A_LOOK: Final = 1e-3


@dataclass(frozen=True)
class Generation:
    """Processes that are ranks together.

    Attributes:
        number: counts up.
        members: the processes' names, in the order of ranks.
        fresh: nobody holds any state; all begin.
        wanted: how many ranks there are to be.
        fewest: with how many the job goes on while others are missing.
    """

    number: int
    members: tuple[str, ...]
    fresh: bool
    wanted: int
    fewest: int


@dataclass(frozen=True)
class Slow:
    """A rank that did not answer for more than half of the heartbeat's limit.

    Attributes:
        rank: which.
        seconds: for how long.
        until: Unix time in seconds, when it answered again or was given up.
        given_up: another process took its place.
    """

    rank: int
    seconds: float
    until: float
    given_up: bool


class Membership:
    """This process as the launcher knows it.

    Attributes:
        process: its name.
        attempt: how often all ranks have begun again.
        now: the generation that it is in; None before the first meeting.
        newest: the number of the newest one that this process has heard of.
        cutter: ends what this process waits for once there is a newer one.
        makes_more: it was started to make ranks more, and takes nobody's place.
    """

    def __init__(self, address: str) -> None:
        host, port, attempt, self.process, beat = address.split()
        self._host, self._port, self.attempt = host, int(port), int(attempt)
        self.store = self.connect()
        self.now: Generation | None = None
        self.newest = -1
        self.makes_more = False
        self.cutter = Cutter()
        self._beats = float(beat) > 0
        self._slow: list[Slow] = []
        if self._beats:
            arguments = (self.connect(), float(beat))
            threading.Thread(target=self._beat, args=arguments, name="onecopy-beat", daemon=True).start()

    def connect(self) -> Any:
        """A connection of its own to the launcher's store."""
        store = dist.TCPStore(self._host, self._port, is_master=False, timeout=_FOR_EVER)  # type: ignore[attr-defined]
        return dist.PrefixStore(f"attempt-{self.attempt}", store)  # type: ignore[attr-defined]

    def await_place(self) -> Generation:
        """Wait until this process is to be a rank. Returns the generation in which it begins."""
        self.store.wait([f"place/{self.process}"])
        first = int(self.store.get(f"place/{self.process}"))
        self.newest = first
        arguments = (self.connect(), first + 1)
        threading.Thread(target=self._watch, args=arguments, name="onecopy-watch", daemon=True).start()
        return self.read(first)

    def read(self, number: int) -> Generation:
        """A generation that the launcher has written."""
        found = json.loads(self.store.get(f"generation/{number}"))
        return Generation(number, tuple(found["members"]), found["fresh"], found["wanted"], found["fewest"])

    def await_next(self) -> Generation:
        """The newest generation after this one; asks for it where the launcher has noticed nothing."""
        current = -1 if self.now is None else self.now.number
        asked_at = time.monotonic() + _A_MOMENT
        while True:
            while self.newest <= current:
                if time.monotonic() > asked_at:
                    self.ask(current)
                    asked_at = float("inf")
                time.sleep(_A_LOOK)
            found = self.read(self.newest)
            if self.process in found.members:
                self.now = found
                return found
            if self.now is not None:
                # It was given up, and another has its place.
                sys.stderr.write(f"{self.process} was given up and ends: another process is its rank now\n")
                sys.stderr.flush()
                os._exit(1)
            # Others train, and let this process in when they like.
            self.makes_more = True
            self.store.set(f"ready/{self.process}", "1")
            current, asked_at = found.number, float("inf")

    def may_grow(self) -> bool:
        """Whether a process waits to be a rank of the next generation."""
        now = self.now
        return now is not None and len(now.members) < now.wanted and bool(self.store.check([f"more/{now.number}"]))

    def ask(self, number: int) -> None:
        """Say that generation ``number`` cannot go on."""
        self.store.set(f"ask/{number}", "1")

    def come(self, generation: Generation) -> bool:
        """Wait until all members have come to the meeting. False: there is a newer generation."""
        number, size = generation.number, len(generation.members)
        self.store.set(f"here/{number}/{self.process}", "1")
        count = self.store.add(f"here/{number}", 1)
        while count < size:
            if self.newest > number:
                return False
            time.sleep(_A_LOOK)
            count = self.store.add(f"here/{number}", 0)
        return True

    def slow(self) -> list[Slow]:
        """Ranks that the launcher has found slow so far."""
        while self._beats and self.store.check([f"slow/{len(self._slow)}"]):
            self._slow.append(Slow(**json.loads(self.store.get(f"slow/{len(self._slow)}"))))
        return self._slow

    def begin(self) -> None:
        """Say that this rank holds its slices, and another one can bring it back from now on."""
        self.store.add("begun", 1)

    def end_well(self) -> None:
        """Say that this process's script has run to its end."""
        self.store.set(f"done/{self.process}", "1")

    def end_job(self, code: int) -> None:
        """Say that all ranks end, for a reason that would come again."""
        self.store.set("over", str(int(code)))

    def fail(self, why: str) -> None:
        """Leave the words with which this process ends."""
        self.store.set(f"failed/{self.process}", why)

    def give_up(self, why: str) -> None:
        """Say that peers' memory is not enough, and wait for the end that the launcher makes of it."""
        self.store.set("hopeless", why)
        time.sleep(60)
        raise CollectiveError(why)

    def _watch(self, store: Any, number: int) -> None:
        try:
            while True:
                store.wait([f"generation/{number}"])
                self.newest = number
                if self.now is not None and self.now.number < number:
                    self.cutter.cut()
                number += 1
        except RuntimeError:
            if sys.is_finalizing():
                return
            sys.stderr.write(
                f"{self.process} ends: the launcher's store at {self._host}:{self._port} cannot be reached. Start the "
                f"job again; it goes on from the newest checkpoint.\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def _beat(self, store: Any, seconds: float) -> None:
        try:
            while True:
                store.add(f"beat/{self.process}", 1)
                time.sleep(seconds)
        except RuntimeError:
            return


_membership: list[Membership] = []


def membership() -> Membership | None:
    """This process's, if `onecopy run` has started it."""
    if not _membership and (address := os.environ.get(ADDRESS)):
        _membership.append(Membership(address))
    return _membership[0] if _membership else None
