"""World: threads that stand for ranks, of which one runs at a time, and somebody who chooses which.

A rank that would wait gives way (`World.wait`) and says for what. A `Chooser` picks one that can go on, or a fault that
strikes one. The state of the world, of which a chooser may take note, is what each thread has seen so far.
What ranks wait for is in `virtual_gloo.py` and `virtual.py`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from onecopy.comm.collective import Collective

LIMIT = 25.0
"""Seconds that a message may take, to those who are told; nobody here looks at a clock."""

_RUNS_BETWEEN_COLLECTIONS = 50
_runs = itertools.count(1)

now = SimpleNamespace(world=None)
"""The world that runs."""


class Deadlock(AssertionError):
    """No rank can go on. The message says what each waits for."""


class Race(AssertionError):
    """Memory was read or changed when it must not be."""


class Stopped(BaseException):
    """Ends the thread of a rank that has died, or whose run is over."""


class Chooser(Protocol):
    """Who goes on, and what goes wrong."""

    def choose(self, runs: int, faults: int, state: Callable[[], Hashable]) -> int:
        """One of ``runs`` threads that can go on, or after them one of ``faults``; ``state`` tells all of the world."""

    def may_stop(self, at: str) -> bool:
        """Whether a rank gives way where it need not: at a "look", a "write", a "post", or a wait that is "ready"."""


@dataclass(eq=False)
class _Actor:
    """A thread of a rank's: its main one, or a server.

    Attributes:
        ready: whether it can go on; what has come does not go again.
        able: whether it was so once.
        waits_for: what it waits for, in words.
        history: of all that it has seen; the same history, the same state.
    """

    rank: int
    name: str
    main: bool
    baton: Any = field(default_factory=threading.Lock)
    ready: Callable[[], bool] = lambda: True
    able: bool = True
    waits_for: str = "its start"
    history: int = 0
    ended: bool = False
    result: Any = None
    error: BaseException | None = None
    thread: Any = None

    def saw(self, *what: Hashable) -> None:
        self.history = hash((self.history, what))


class World:
    """Some ranks and what goes on between them.

    Args:
        size: how many ranks there are.
        chooser: decides.
        faults: "death" and "time-out", those that may strike one rank once.
        quiet: the chooser is asked only while all ranks are in the `open_part` of what they do.
    """

    def __init__(
        self,
        size: int,
        chooser: Chooser,
        *,
        faults: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        self.size = size
        self.chooser = chooser
        self.faults = list(faults)
        self.struck: str | None = None
        self.actors: list[_Actor] = []
        self.current: _Actor | None = None
        self.dead: set[int] = set()
        self.cut: set[int] = set()
        """Ranks whose sockets are closed."""
        self._late: set[int] = set()
        """Ranks whose wait runs out."""
        self.went_on = False
        """A rank that was told of a lost one goes on: others may wait for what it has given up, until time is up."""
        self.failure: BaseException | None = None
        self.stopping = False
        self.decisions = 0
        self.quiet = quiet
        self._came: list[int] = [0, 0]
        self._over = threading.Lock()

    @property
    def rank(self) -> int:
        """The rank that is running."""
        assert self.current is not None
        return self.current.rank

    def run(self, function: Callable[[int], Any]) -> list[_Actor]:
        """Call ``function`` with each rank. Returns the ranks' main threads, ended, with result or error.

        Raises:
            Deadlock, Race: and whatever the chooser raises.
        """
        self._over.acquire()
        for rank in range(self.size):
            self.start(rank, f"rank {rank}", lambda rank=rank: function(rank), main=True)
        ranks = list(self.actors)
        now.world = self
        if next(_runs) % _RUNS_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        self._pass_on(self._decide())
        self._over.acquire()
        self.stopping = True
        for actor in self.actors:
            if not actor.ended:
                self._pass_on(actor)
            actor.thread.join()
        if self.failure is not None:
            raise self.failure
        return ranks

    def start(self, rank: int, name: str, function: Callable[[], Any], *, main: bool) -> None:
        actor = _Actor(rank, name, main)
        actor.baton.acquire()
        actor.thread = threading.Thread(target=self._live, args=(actor, function), name=name, daemon=True)
        self.actors.append(actor)
        actor.thread.start()

    def _live(self, actor: _Actor, function: Callable[[], Any]) -> None:
        actor.baton.acquire()
        try:
            if not self.stopping:
                actor.saw("its start")
                actor.result = function()
        except Stopped:
            pass
        except BaseException as error:
            actor.error = error
            if isinstance(error, Race):
                self.failure = self.failure or error
        actor.ended = True
        actor.saw("ended", actor.error is None)
        if actor.main and actor.error is not None:
            # Its process ends, as a training's does that nobody watches over.
            self.dead.add(actor.rank)
        if not self.stopping:
            self._pass_on(self._decide())

    # --- who goes on

    def wait(
        self, ready: Callable[[], bool], waits_for: str, limit: float | None = None, *, stops: bool = False
    ) -> None:
        """Give way until ``ready``, and until the running thread is chosen again. Without a ``limit`` for ever.

        Where it is ready already, the chooser says whether to stop, unless it ``stops`` at any rate.

        Returns:
            Whether it is ready; else the time is up.
        """
        self.check()
        me = self.current
        assert me is not None
        if (limit is None or limit >= LIMIT) and (stops or self.chooser.may_stop("ready") or not ready()):
            me.ready, me.able, me.waits_for = ready, False, waits_for
            chosen = self._decide()
            if chosen is me:
                self.current = me
            else:
                self._pass_on(chosen)
                me.baton.acquire()
            self.check()
        is_ready = limit is None or ready()
        me.saw(is_ready, *self.dead, "cut", *self.cut)
        if me.main:
            self._late.discard(self.rank)
        return is_ready

    @contextmanager
    def open_part(self) -> Iterator[None]:
        """What is worth trying in every order. Ranks enter it together, and leave it together."""
        self._meet(0)
        yield
        self._meet(1)

    def _meet(self, gate: int) -> None:
        if self.quiet:
            self._came[gate] += 1
            self.wait(lambda: self._came[gate] + len(self.dead) >= self.size, "the other ranks")

    @property
    def _is_open(self) -> bool:
        return not self.quiet or (self._came[0] == self.size and self._came[1] + len(self.dead) < self.size)

    def give_way(self, at: str) -> None:
        """Let others go first, perhaps."""
        self.check()
        if self._is_open and self.chooser.may_stop(at):
            self.wait(lambda: True, f"its turn at a {at}", stops=True)

    def check(self) -> None:
        """End the running thread if its rank has died."""
        if self.stopping or self.rank in self.dead:
            raise Stopped

    def choose_among(self, count: int) -> int:
        """One of ``count`` things that may happen to the running thread."""
        chosen = 0
        if count > 1 and self._is_open:
            try:
                chosen = self.chooser.choose(count, 0, lambda: (self._state(), "among"))
            except BaseException as error:
                # Of the chooser's, which is none of the thread's.
                self.failure = error
                raise Stopped from error
        assert self.current is not None
        self.current.saw(chosen)
        return chosen

    def _state(self) -> Hashable:
        return tuple(actor.history for actor in self.actors), self.struck

    def _pass_on(self, chosen: _Actor | None) -> None:
        if chosen is None:
            self._over.release()
        else:
            self.current = chosen
            chosen.baton.release()

    def _decide(self) -> _Actor | None:
        """Who goes on; None if the run is over."""
        alive = [actor for actor in self.actors if not actor.ended and actor.rank not in self.dead]
        ranks = [actor for actor in alive if actor.main]
        if not ranks or self.failure is not None:
            return None
        try:
            able = [actor for actor in alive if self._is_able(actor)]
            if not able and self.went_on:
                self._late.add(ranks[0].rank)
                return ranks[0]
            if not able:
                raise Deadlock(self._describe(ranks))
            faults = [(fault, actor) for fault in self.faults for actor in ranks]
            chosen = self.decisions % len(able) if self.quiet else 0
            if self._is_open and len(able) + len(faults) > 1:
                chosen = self.chooser.choose(len(able), len(faults), self._state)
            self.decisions += 1
            if chosen < len(able):
                return able[chosen]
            return self._strike(*faults[chosen - len(able)])
        except BaseException as error:
            self.failure = error
            return None

    def _is_able(self, actor: _Actor) -> bool:
        if not actor.able:
            # What it looks at is what its own process can read.
            self.current = actor
            actor.able = actor.ready()
        return actor.able

    def _strike(self, fault: str, actor: _Actor) -> _Actor:
        self.faults = []
        self.struck = f"{fault} of {actor.name}"
        actor.saw(fault)
        if fault == "death":
            self.dead.add(actor.rank)
        else:
            self._late.add(actor.rank)
        return actor

    def _describe(self, ranks: Sequence[_Actor]) -> str:
        frames = sys._current_frames()
        lines = [f"no rank can go on (after: {self.struck})" if self.struck else "no rank can go on"]
        for actor in ranks:
            frame = frames.get(actor.thread.ident)
            steps = [f"{s.name}:{s.lineno}" for s in traceback.extract_stack(frame) if "/onecopy/" in s.filename]
            while frame is not None and not isinstance(frame.f_locals.get("self"), Collective):
                frame = frame.f_back
            what = frame.f_locals["self"]._subject if frame is not None else "no collective"
            lines.append(f"{actor.name}: {what}: {actor.waits_for} [{' '.join(steps[-9:])}]")
        return "\n".join(lines)

    def race(self, what: str) -> Race:
        """What ends this run, whoever catches it."""
        self.failure = self.failure or Race(what)
        return Race(what)
