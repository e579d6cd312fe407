"""Launcher: starts the ranks of one host, and puts another process in the place of one that has ended.

    a process ends            noticed at once (SIGCHLD of the zygote); all others are told of the next generation
    a heartbeat stays away    it is named after half of the limit, and ended after all of it
    a meeting fails           whoever was in it asks for the next generation
    no spare waits            where fewer ranks may train, they do, and another process joins them when it is ready
    nothing can be repaired   all are ended and start anew, from the newest checkpoint

A process may end by itself in one way alone: its script has run to the end. Whatever else ends one (`os._exit(0)` in
its middle too) is a loss. There are limits: so many losses within an hour end the job, with the last traceback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from onecopy.resilience.forks import Forks
from onecopy.resilience.membership import ADDRESS

USAGE: Final = 2
"""Exit code of a script that refuses its arguments or settings, which it would do again."""

_HOST: Final = "127.0.0.1"
_A_LOOK: Final = 0.01
_A_LONG_LOOK: Final = 0.05
"""Seconds between two looks at the store, while ranks meet and while they train; an end is told of at once."""

_HOUR: Final = 3600.0
_ASKS: Final = 10
"""Meetings that may fail for each loss that the limit allows."""

_GRACE: Final = 20.0
"""Seconds that ranks get to end by themselves after a signal."""


@dataclass(frozen=True)
class Job:
    """What is to run.

    Attributes:
        arguments: of the script, itself the first.
        ranks: that train.
        spares: processes more, which wait in `onecopy.join`.
        heartbeat: seconds after which a rank that does not answer is given up; 0: never.
        limit: losses within an hour that are made good.
        arrival: seconds that a rank may take to come to a meeting, with a long step before it.
        is_module: the script is a module's name.
        fewest: ranks with which the job goes on while others are missing; 0: it waits for each.
        rejoin: seconds after a loss until a process is started to make ranks more again; inf: never.
    """

    arguments: Sequence[str]
    ranks: int
    spares: int = 0
    heartbeat: float = 0.0
    limit: int = 20
    arrival: float = 300.0
    is_module: bool = False
    fewest: int = 0
    rejoin: float = 0.0


class Launcher:
    """Runs one job to its end."""

    def __init__(self, job: Job, forks: Forks) -> None:
        self._job = job
        self._forks = forks
        # Its own socket, for the store can only be told a port, and would listen on every address.
        listening = socket.create_server((_HOST, 0))
        self.port = listening.getsockname()[1]
        self._server: Any = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
        self._attempt = -1
        self._count = 0
        self._pids: dict[str, int] = {}
        self._losses: deque[float] = deque()
        self._asked: deque[float] = deque()
        self._traceback = ""
        self._signalled = 0
        self._codes: dict[str, int] = {}

    def run(self) -> int:
        """Returns the exit code: 0 if every rank's script has run to its end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note_signal)
        try:
            self._begin()
            while (code := self._look()) is None:
                pass
        except _Ended as ended:
            code = ended.code
        finally:
            self._end_all()
            self._forks.close()
        return code

    # --- processes

    def _start(self) -> str:
        name = f"process-{self._count}"
        self._count += 1
        beat = self._job.heartbeat / 10
        environment = {
            ADDRESS: f"{_HOST} {self.port} {self._attempt} {name} {beat}",
            "WORLD_SIZE": str(self._job.ranks),
            "LOCAL_WORLD_SIZE": str(self._job.ranks),
        }
        arguments = ["m" if self._job.is_module else "", *self._job.arguments]
        self._forks.start(name, environment, arguments)
        self._pids[name] = 0
        return name

    def _begin(self) -> None:
        """All ranks begin, with nothing but what checkpoints hold."""
        self._attempt += 1
        self._store: Any = dist.PrefixStore(f"attempt-{self._attempt}", self._server)  # type: ignore[attr-defined]
        self._members = [self._start() for _ in range(self._job.ranks)]
        self._spares = [self._start() for _ in range(self._job.spares)]
        self._finished: set[str] = set()
        self._new: set[str] = set()
        # When further processes are to be started, and those that were and are no ranks yet.
        self._due: list[float] = []
        self._joining: list[str] = []
        self._generation = -1
        self._beats: dict[str, tuple[int, float, bool]] = {}
        self._publish(fresh=True)
        for name in self._members:
            self._store.set(f"place/{name}", "0")

    def _publish(self, *, fresh: bool = False) -> None:
        for name in [name for name in self._joining if self._store.check([f"ready/{name}"])]:
            self._joining.remove(name)
            self._members.append(name)
            self._new.add(name)
            self._say(f"another process joins: {len(self._members)} ranks")
        self._generation += 1
        self._published = time.monotonic()
        self._is_met = self._is_told = False
        numbers = {"wanted": self._job.ranks, "fewest": self._job.fewest or self._job.ranks}
        told = {"members": self._members, "fresh": fresh, **numbers}
        self._store.set(f"generation/{self._generation}", json.dumps(told))

    def _end_all(self) -> None:
        for name in list(self._pids):
            self._kill(name)

    def _kill(self, name: str) -> None:
        if pid := self._pids.get(name):
            # Its number is not given to another process before the zygote has read how it ended.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- what happens

    def _look(self) -> int | None:
        """Wait a moment for something to happen. Returns the job's exit code once it is over."""
        answers = self._forks.answers(_A_LONG_LOOK if self._is_met else _A_LOOK)
        if answers is None:
            self._say("the process that starts ranks has ended")
            return 1
        for answer in answers:
            if "pid" in answer:
                self._pids[answer["process"]] = answer["pid"]
            elif "code" in answer:
                self._pids.pop(answer["process"], None)
                self._ended(answer["process"], answer["code"])
        if len(self._finished) == len(self._members):
            return max(self._codes[name] for name in self._members)
        if self._finished and set(self._members) - self._finished <= self._new:
            self._say("a rank was lost when the others had come to the end of the script")
            return 1
        if self._signalled:
            return self._stop()
        self._look_at_meeting()
        self._look_at_joining()
        self._look_at_beats()
        return None

    def _ended(self, name: str, code: int) -> None:
        self._codes[name] = code
        if self._store.check([f"failed/{name}"]):
            self._traceback = self._store.get(f"failed/{name}").decode()
        if name in self._spares:
            self._spares.remove(name)
            self._count_loss(f"a spare ended {_how(code)}")
            self._spares.append(self._start())
            return
        if name in self._joining:
            self._joining.remove(name)
            self._count_loss(f"a process that was to join ended {_how(code)}")
            self._due.append(time.monotonic() + self._job.rejoin)
            return
        if name not in self._members:
            return
        rank = self._members.index(name)
        if self._store.check([f"done/{name}"]):
            self._finished.add(name)
            return
        if code == USAGE:
            raise _Ended(code)
        if self._store.check(["over"]):
            raise _Ended(int(self._store.get("over")))
        what = f"rank {rank} ended {_how(code)}"
        if self._finished or self._signalled:
            if not self._signalled:
                self._say(f"{what}, when others had come to the end of the script")
            raise _Ended(abs(code) or 1)
        self._count_loss(what)
        if self._store.add("begun", 0) < len(self._members):
            if self._attempt == 0 and code > 0:
                self._say(f"{what} before training had begun")
                raise _Ended(code)
            self._begin_again(f"{what} before training had begun")
            return
        if self._members == [name]:
            self._begin_again(f"{what}, and there is no other one")
            return
        if not self._spares and 0 < self._job.fewest < len(self._members):
            self._members.remove(name)
            self._due.append(time.monotonic() + self._job.rejoin)
            self._say(f"{what}; {len(self._members)} go on")
            self._publish()
            return
        new = self._spares.pop(0) if self._spares else self._start()
        self._say(f"{what}; {'a spare' if self._job.spares else 'another process'} takes its place")
        self._members[rank] = new
        self._new.add(new)
        self._publish()
        self._store.set(f"place/{new}", str(self._generation))
        if self._job.spares:
            self._spares.append(self._start())

    def _begin_again(self, why: str) -> None:
        self._say(f"{why}: all ranks begin again, from the newest checkpoint if there is one")
        self._end_all()
        self._begin()

    def _count_loss(self, what: str) -> None:
        now = time.monotonic()
        self._losses.append(now)
        while now - self._losses[0] > _HOUR:
            self._losses.popleft()
        if len(self._losses) > self._job.limit:
            last = f" The last traceback:\n{self._traceback}" if self._traceback else ""
            self._say(f"{what}, the {_ordinal(len(self._losses))} loss within an hour: giving up.{last}")
            raise _Ended(1)

    def _look_at_meeting(self) -> None:
        number = self._generation
        if self._store.check(["hopeless"]):
            why = self._store.get("hopeless").decode()
            self._count_loss(why)
            self._begin_again(why)
            return
        if self._store.check([f"ask/{number}"]):
            now = time.monotonic()
            self._asked.append(now)
            while now - self._asked[0] > _HOUR:
                self._asked.popleft()
            if len(self._asked) > _ASKS * self._job.limit:
                self._say(f"{len(self._asked)} meetings of ranks have failed within an hour: giving up")
                raise _Ended(1)
            self._publish()
            return
        if self._is_met or self._store.add(f"here/{number}", 0) == len(self._members):
            self._is_met = True
            self._new.clear()
        elif time.monotonic() - self._published > self._job.arrival:
            for rank, name in enumerate(self._members):
                if not self._store.check([f"here/{number}/{name}"]):
                    self._say(f"rank {rank} has not come to the others for {self._job.arrival:.0f} s and is given up")
                    self._kill(name)
            self._published = time.monotonic()

    def _look_at_joining(self) -> None:
        """Start processes that are due to make ranks more again; let the ranks know of those that are ready."""
        while self._due and self._due[0] <= time.monotonic():
            self._due.pop(0)
            name = self._spares.pop(0) if self._spares else self._start()
            self._joining.append(name)
            self._store.set(f"place/{name}", str(self._generation))
        if self._is_met and not self._is_told and any(self._store.check([f"ready/{name}"]) for name in self._joining):
            self._is_told = True
            self._store.set(f"more/{self._generation}", "1")

    def _look_at_beats(self) -> None:
        if not self._job.heartbeat:
            return
        now = time.monotonic()
        for rank, name in enumerate(self._members):
            count = self._store.add(f"beat/{name}", 0)
            known, since, told = self._beats.get(name, (0, now, False))
            if count != known or not count:
                if told:
                    self._say(f"rank {rank} is back")
                self._beats[name] = (count, now, False)
            elif self._store.check([f"done/{name}"]):
                # What is left of its end takes as long as it takes, and no thread may beat any more.
                continue
            elif now - since > self._job.heartbeat:
                self._say(f"rank {rank} has not been heard of for {now - since:.2f} s and is given up")
                self._kill(name)
                self._beats[name] = (0, now + _GRACE, False)
            elif now - since > self._job.heartbeat / 2 and not told:
                self._say(f"rank {rank} is slow: it has not been heard of for {now - since:.2f} s")
                self._beats[name] = (known, since, True)

    def _note_signal(self, number: int, _: object) -> None:
        self._signalled = number

    def _stop(self) -> int:
        """A signal came: it goes to all ranks, which may save; a second one ends them."""
        number, self._signalled = self._signalled, 0
        deadline = time.monotonic() + _GRACE
        for name in self._members:
            if pid := self._pids.get(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        for name in (*self._spares, *self._joining):
            self._kill(name)
        while time.monotonic() < deadline and any(name in self._pids for name in self._members):
            if self._signalled:
                break
            for answer in self._forks.answers(_A_LOOK) or ():
                if "code" in answer:
                    self._pids.pop(answer["process"], None)
                    self._codes[answer["process"]] = answer["code"]
        codes = {self._codes.get(name, 1) for name in self._members}
        return codes.pop() if len(codes) == 1 and min(codes) >= 0 else 128 + number

    def _say(self, words: str) -> None:
        sys.stderr.write(f"onecopy run: {words}\n")
        sys.stderr.flush()


class _Ended(Exception):
    """The job is over, with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _ordinal(number: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"


def _how(code: int) -> str:
    if code < 0:
        hint = " (often the host has run out of memory)" if code == -signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{hint}"
    return f"with exit code {code}" if code else "in the middle of its script, with exit code 0"
