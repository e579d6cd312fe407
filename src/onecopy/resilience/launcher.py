"""Launcher: starts the ranks of a job, and puts another process in the place of one that has ended, on the same host.

    a process ends            noticed at once (SIGCHLD of the zygote); all others are told of the next generation
    a heartbeat stays away    it is named after half of the limit, and ended after all of it
    a meeting fails           whoever was in it asks for the next generation
    no spare waits            where fewer ranks may train, they do, and another process joins them when it is ready
    nothing can be repaired   all are ended and start anew, from the newest checkpoint
    a host is lost            its ranks are replaced once another launcher is there in its place (`hosts.py`)

A process may end by itself in one way alone: its script has run to the end. Whatever else ends one (`os._exit(0)` in
its middle too) is a loss. There are limits: so many losses within an hour end the job, with the last traceback.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from onecopy.resilience.forks import Forks
from onecopy.resilience.hosts import Hosts
from onecopy.resilience.membership import ADDRESS, Slow

USAGE: Final = 2
"""Exit code of a script that refuses its arguments or settings, which it would do again."""

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
        ranks: that train, on each host.
        spares: processes more on each host, which wait in `onecopy.join`.
        heartbeat: seconds after which a rank that does not answer is given up; 0: never.
        limit: losses within an hour that are made good.
        arrival: seconds that a rank may take to come to a meeting, with a long step before it.
        is_module: the script is a module's name.
        fewest: ranks with which the job goes on while others are missing; 0: it waits for each.
        rejoin: seconds after a loss until a process is started to make ranks more again; inf: never.
        hosts: how many there are.
        patience: seconds for which a host may be missing.
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
    hosts: int = 1
    patience: float = 300.0

    @property
    def command(self) -> list[str]:
        """What processes are to run, as `zygote.py` reads it."""
        return ["m" if self.is_module else "", *self.arguments]


class Launcher:
    """Runs one job to its end."""

    def __init__(self, job: Job, forks: Forks | Hosts) -> None:
        self._job = job
        self._forks = forks
        # Its own socket, for the store can only be told a port, and would listen on every address.
        listening = socket.create_server((forks.address, 0))
        self.port = listening.getsockname()[1]
        self._server: Any = dist.TCPStore(  # type: ignore[attr-defined]
            forks.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
        self._attempt = -1
        self._count = 0
        self._running: set[str] = set()
        self._losses: deque[float] = deque()
        self._asked: deque[float] = deque()
        self._traceback = ""
        self._signalled = 0
        self._codes: dict[str, int] = {}

    def run(self) -> int:
        """Returns the exit code: 0 if every rank's script has run to its end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note_signal)
        code: int | None = None
        try:
            self._begin()
            while code is None:
                code = self._look()
        except _Ended as ended:
            code = ended.code
        finally:
            self._end_all()
            self._forks.close(1 if code is None else code)
        return code

    # --- processes

    def _start(self, host: int) -> str:
        name = f"process-{self._count}"
        self._count += 1
        beat = self._job.heartbeat / 10
        environment = {
            ADDRESS: f"{self._forks.address} {self.port} {self._attempt} {name} {beat}",
            "WORLD_SIZE": str(self._job.ranks * self._job.hosts),
            "LOCAL_WORLD_SIZE": str(self._job.ranks),
        }
        self._running.add(name)
        self._forks.start(name, host, environment, self._job.command)
        return name

    def _begin(self) -> None:
        """All ranks begin, with nothing but what checkpoints hold."""
        self._attempt += 1
        self._store: Any = dist.PrefixStore(f"attempt-{self._attempt}", self._server)  # type: ignore[attr-defined]
        hosts = range(self._job.hosts)
        self._members = [self._start(host) for host in hosts for _ in range(self._job.ranks)]
        self._spares = {host: [self._start(host) for _ in range(self._job.spares)] for host in hosts}
        self._finished: set[str] = set()
        self._new: set[str] = set()
        # When further processes are to be started, and those that were and are no ranks yet.
        self._due: list[float] = []
        self._joining: list[str] = []
        self._generation = -1
        self._beats: dict[str, tuple[int, float, bool]] = {}
        self._slow_count = 0
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
        wanted = self._job.ranks * self._job.hosts
        told = {"members": self._members, "fresh": fresh, "wanted": wanted, "fewest": self._job.fewest or wanted}
        self._store.set(f"generation/{self._generation}", json.dumps(told))

    def _end_all(self) -> None:
        for name in list(self._running):
            self._forks.kill(name)

    # --- what happens

    def _look(self) -> int | None:
        """Wait a moment for something to happen. Returns the job's exit code once it is over."""
        answers = self._forks.answers(_A_LONG_LOOK if self._is_met else _A_LOOK)
        if answers is None:
            self._say("the process that starts ranks has ended")
            return 1
        for answer in answers:
            if "code" in answer:
                self._running.discard(answer["process"])
                self._ended(answer["process"], answer["code"])
            elif "lost" in answer:
                self._lost(answer["lost"], answer["processes"])
            elif "signal" in answer:
                self._signalled = answer["signal"]
        if len(self._finished) == len(self._members):
            return max(self._codes[name] for name in self._members)
        if self._finished and set(self._members) - self._finished <= self._new:
            self._say("a rank was lost when the others had come to the end of the script")
            return 1
        if self._signalled:
            return self._stop()
        self._look_at_hosts()
        self._look_at_meeting()
        self._look_at_joining()
        self._look_at_beats()
        return None

    def _ended(self, name: str, code: int) -> None:
        self._codes[name] = code
        if self._store.check([f"failed/{name}"]):
            self._traceback = self._store.get(f"failed/{name}").decode()
        for host, spares in self._spares.items():
            if name in spares:
                spares.remove(name)
                self._count_loss(f"a spare ended {_how(code)}")
                spares.append(self._start(host))
                return
        if name in self._joining:
            self._joining.remove(name)
            self._count_loss(f"a process that was to join ended {_how(code)}")
            self._due.append(time.monotonic() + self._job.rejoin)
            return
        if name not in self._members or self._is_done(name):
            return
        if code == USAGE:
            raise _Ended(code)
        if self._store.check(["over"]):
            raise _Ended(int(self._store.get("over")))
        self._replace([name], f"rank {self._members.index(name)} ended {_how(code)}", code)

    def _lost(self, host: int, names: Sequence[str]) -> None:
        """A host was lost, with so many of the processes on it as still ran."""
        self._running -= set(names)
        self._codes |= dict.fromkeys(names, -signal.SIGKILL)
        lost = [name for name in self._members if name in names and not self._is_done(name)]
        self._spares[host] = []
        if lost:
            ranks = ", ".join(str(self._members.index(name)) for name in lost)
            self._replace(lost, f"rank{'s' if len(lost) > 1 else ''} {ranks} ended with host {host}", -signal.SIGKILL)
        self._spares[host] += [self._start(host) for _ in range(self._job.spares - len(self._spares[host]))]

    def _is_done(self, name: str) -> bool:
        """Whether a rank's script has run to its end."""
        if self._store.check([f"done/{name}"]):
            self._finished.add(name)
        return name in self._finished

    def _replace(self, lost: Sequence[str], what: str, code: int) -> None:
        """Put other processes in the places of ranks that have ended."""
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
        if set(self._members) == set(lost):
            self._begin_again(f"{what}, and there is no other one")
            return
        if not any(self._spares.values()) and 0 < self._job.fewest < len(self._members):
            for name in lost:
                self._members.remove(name)
                self._due.append(time.monotonic() + self._job.rejoin)
            self._say(f"{what}; {len(self._members)} go on")
            self._publish()
            return
        new = []
        for name in lost:
            rank = self._members.index(name)
            spares = self._spares[rank // self._job.ranks]
            new.append(spares.pop(0) if spares else self._start(rank // self._job.ranks))
            self._members[rank] = new[-1]
        which = "a spare takes its" if self._job.spares else "another process takes its"
        self._say(f"{what}; {which if len(new) == 1 else 'other processes take their'} place{'s' if new[1:] else ''}")
        self._new.update(new)
        self._publish()
        for name in new:
            self._store.set(f"place/{name}", str(self._generation))
        for host, spares in self._spares.items():
            spares += [self._start(host) for _ in range(self._job.spares - len(spares))]

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

    def _look_at_hosts(self) -> None:
        for host, seconds in self._forks.missing().items():
            # Ranks that have come wait for it.
            self._published = time.monotonic()
            if seconds > self._job.patience:
                self._say(
                    f"host {host} has not been there for {seconds:.0f} s (--join-timeout): giving up. Start the job "
                    "again on all hosts; it goes on from the newest checkpoint."
                )
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
                    self._forks.kill(name)
            self._published = time.monotonic()

    def _look_at_joining(self) -> None:
        """Start processes that are due to make ranks more again; let the ranks know of those that are ready."""
        while self._due and self._due[0] <= time.monotonic():
            self._due.pop(0)
            name = self._spares[0].pop(0) if self._spares[0] else self._start(0)
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
                    self._say(f"rank {rank} is back after {now - since:.2f} s")
                    self._tell_slow(rank, now - since, given_up=False)
                self._beats[name] = (count, now, False)
            elif self._store.check([f"done/{name}"]):
                # What is left of its end takes as long as it takes, and no thread may beat any more.
                continue
            elif now - since > self._job.heartbeat:
                self._say(f"rank {rank} has not been heard of for {now - since:.2f} s and is given up")
                self._tell_slow(rank, now - since, given_up=True)
                self._forks.kill(name)
                self._beats[name] = (0, now + _GRACE, False)
            elif now - since > self._job.heartbeat / 2 and not told:
                self._say(f"rank {rank} is slow: it has not been heard of for {now - since:.2f} s")
                self._beats[name] = (known, since, True)

    def _tell_slow(self, rank: int, seconds: float, *, given_up: bool) -> None:
        """Tell the ranks, whose metrics have it, too."""
        slow = Slow(rank, seconds, time.time(), given_up)
        self._store.set(f"slow/{self._slow_count}", json.dumps(asdict(slow)))
        self._slow_count += 1

    def _note_signal(self, number: int, _: object) -> None:
        self._signalled = number

    def _stop(self) -> int:
        """A signal came: it goes to all ranks, which may save; a second one ends them."""
        number, self._signalled = self._signalled, 0
        deadline = time.monotonic() + _GRACE
        for name in self._members:
            self._forks.kill(name, number)
        for name in (*self._joining, *(name for spares in self._spares.values() for name in spares)):
            self._forks.kill(name)
        while time.monotonic() < deadline and any(name in self._running for name in self._members):
            if self._signalled:
                break
            for answer in self._forks.answers(_A_LOOK) or ():
                if "code" in answer:
                    self._running.discard(answer["process"])
                    self._codes[answer["process"]] = answer["code"]
                self._running -= set(answer.get("processes", ()))
                self._signalled = answer.get("signal", self._signalled)
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
