"""Virtual ranks: onecopy's own code on 2 to 4 ranks in one process, whose every interleaving is somebody's choice.

Each rank runs in a thread of its own, and one thread at a time. Wherever a rank would wait for a message, it gives way,
and a `Chooser` says who goes on. What lies below onecopy is virtual: gloo's messages, the memory of other processes,
process ids and the locks of the server's thread. All that is onecopy's own runs as it is: engine, reducer, shelves,
servers, mailboxes. `schedules.py` says what the ranks do and which interleavings are tried.

    memory     a tensor on offer is copied only when its receiver comes to fetch it, and gone only when that is done
    sockets    a message is delivered once both sides have posted it, whatever they are doing
    shelves    what is laid out can be read at any time, whatever its owner is doing; over sockets through its server

Checked at every step: somebody can run; nobody reads a shelf whose owner may be writing; what is under way does not
change, and what has not arrived is not read (it holds NaN).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm import (
    backends,
    collective,
    cross_memory,
    direct_exchange,
    mailbox,
    mesh,
    remote_memory,
    serving,
    shelf,
)
from onecopy.sharding import api, versions

LIMIT = 25.0
"""Seconds that a message may take, to those who are told; nobody here looks at a clock."""

_FIRST_PROCESS = 5000

_RUNS_BETWEEN_COLLECTIONS = 50
_runs = itertools.count(1)

_now = SimpleNamespace(world=None)
"""The world that runs."""


class Deadlock(AssertionError):
    """No rank can go on. The message says what each waits for."""


class Race(AssertionError):
    """Memory was read or changed when it must not be."""


class _Stopped(BaseException):
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
        machines: for each rank the machine that it runs on; ranks on one machine read each other's memory.
        chooser: decides.
        faults: "death" and "time-out", those that may strike one rank once.
        eager: messages over sockets are delivered at once when both sides have posted them, else as late as possible.
        quiet: the chooser is asked only while all ranks are in the `open_part` of what they do.
    """

    def __init__(
        self,
        machines: Sequence[int],
        chooser: Chooser,
        *,
        faults: Sequence[str] = (),
        eager: bool = True,
        quiet: bool = False,
    ) -> None:
        self.machines = tuple(machines)
        self.eager = eager
        self.chooser = chooser
        self.faults = list(faults)
        self.struck: str | None = None
        self.actors: list[_Actor] = []
        self.current: _Actor | None = None
        self.dead: set[int] = set()
        self.cut: set[int] = set()
        """Ranks whose sockets are closed."""
        self.late: set[int] = set()
        """Ranks whose every wait runs out."""
        self.went_on = False
        """A rank that was told of a lost one goes on: others may wait for what it has given up, until time is up."""
        self.failure: BaseException | None = None
        self.stopping = False
        self.decisions = 0
        self.quiet = quiet
        self._came: list[int] = [0, 0]
        self.groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self.objects: dict[tuple[tuple[int, ...], int, int], object] = {}
        self.calls: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self.channels: dict[Any, _Channel] = defaultdict(_Channel)
        self.numbers = [itertools.count() for _ in machines]
        self.offered: dict[int, tuple[Tensor, bytes]] = {}
        self.laid: dict[int, _Laid] = {}
        self._over = threading.Lock()

    @property
    def size(self) -> int:
        return len(self.machines)

    @property
    def rank(self) -> int:
        """The rank that is running."""
        assert self.current is not None
        return self.current.rank

    def group(self, ranks: Sequence[int]) -> Group:
        """The running rank's end of a process group."""
        return self.groups.setdefault((self.rank, tuple(ranks)), Group(self.rank, tuple(ranks)))

    def run(self, function: Callable[[int], Any]) -> list[_Actor]:
        """Call ``function`` with each rank. Returns the ranks' main threads, ended, with result or error.

        Raises:
            Deadlock, Race: and whatever the chooser raises.
        """
        self._over.acquire()
        for rank in range(self.size):
            self.start(rank, f"rank {rank}", lambda rank=rank: function(rank), main=True)
        ranks = list(self.actors)
        _now.world = self
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
        except _Stopped:
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

        Raises:
            RuntimeError: as gloo and mailboxes do when the time is up.
        """
        self.check()
        me = self.current
        assert me is not None
        may_wait = limit is None or (limit >= LIMIT and self.rank not in self.late)
        if may_wait and (stops or self.chooser.may_stop("ready") or not ready()):
            me.ready, me.able, me.waits_for = ready, False, waits_for
            chosen = self._decide()
            if chosen is me:
                self.current = me
            else:
                self._pass_on(chosen)
                me.baton.acquire()
            self.check()
        is_late = limit is not None and (limit < LIMIT or self.rank in self.late) and not ready()
        me.saw(is_late, *self.dead, "cut", *self.cut, "late", *self.late)
        if is_late:
            raise RuntimeError(f"timed out: {waits_for} for {limit:.1f} s")

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
            raise _Stopped

    def choose_among(self, count: int) -> int:
        """One of ``count`` things that may happen to the running thread."""
        chosen = 0 if count == 1 else self.chooser.choose(count, 0, lambda: (self._state(), "among"))
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
                self.late.add(ranks[0].rank)
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
            self.late.add(actor.rank)
            # gloo closes all connections of whoever loses patience.
            self.cut.add(actor.rank)
        return actor

    def _describe(self, ranks: Sequence[_Actor]) -> str:
        frames = sys._current_frames()
        lines = [f"no rank can go on (after: {self.struck})" if self.struck else "no rank can go on"]
        for actor in ranks:
            frame = frames.get(actor.thread.ident)
            steps = [f"{s.name}:{s.lineno}" for s in traceback.extract_stack(frame) if "/onecopy/" in s.filename]
            while frame is not None and not isinstance(frame.f_locals.get("self"), collective.Collective):
                frame = frame.f_back
            what = frame.f_locals["self"]._subject if frame is not None else "no collective"
            lines.append(f"{actor.name}: {what}: {actor.waits_for} [{' '.join(steps[-9:])}]")
        return "\n".join(lines)

    # --- memory

    def process(self, rank: int) -> int:
        return _FIRST_PROCESS + rank

    def can_read(self, process: int) -> bool:
        """Whether the memory of ``process`` is there for the rank that is running."""
        rank = process - _FIRST_PROCESS
        return rank not in self.dead and self.machines[rank] == self.machines[self.rank]

    def read(self, address: int, into: int, nbytes: int) -> None:
        """Copy bytes out of another rank's memory."""
        laid = self.laid.get(address)
        if laid is not None and nbytes == laid.tensor.nbytes:
            laid.check()
        elif (offer := self.offered.get(address)) is not None and self.struck is None and _bytes(offer[0]) != offer[1]:
            raise self.race("a tensor changed while it was on offer")
        ctypes.memmove(into, address, nbytes)

    def race(self, what: str) -> Race:
        """What ends this run, whoever catches it."""
        self.failure = self.failure or Race(what)
        return Race(what)


class Group:
    """One rank's end of a process group."""

    _device_types: ClassVar = [torch.device("cpu")]

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._place = ranks.index(rank)

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self.ranks)

    def _get_backend(self, device: torch.device) -> Any:
        options = SimpleNamespace(_timeout=timedelta(seconds=LIMIT))
        return SimpleNamespace(name=lambda: "gloo", options=options)


class Mesh(DeviceMesh):
    """``shape`` is (replicas, shards)."""

    mesh_dim_names = ("replicate", "shard")

    def __init__(self, world: World, shape: tuple[int, int]) -> None:
        ranks = torch.arange(world.size).view(shape)
        replica, shard = divmod(world.rank, shape[1])
        self._virtual = {
            "replicate": world.group(ranks[:, shard].tolist()),
            "shard": world.group(ranks[replica].tolist()),
        }

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        name = self.mesh_dim_names[mesh_dim] if isinstance(mesh_dim, int) else mesh_dim
        return self._virtual[name]  # type: ignore[index]


# --- messages over sockets


class _Channel:
    """Messages from one rank to another under one tag, in order."""

    def __init__(self) -> None:
        self.sent: deque[_Send] = deque()
        self.wanted: deque[_Receive] = deque()

    def match(self, world: World) -> None:
        while self.sent and self.wanted:
            send, receive = self.sent.popleft(), self.wanted.popleft()
            send.receive, receive.send = receive, send
            if world.eager:
                send.deliver()


class _Message:
    """What `isend` or `irecv` returns."""

    def __init__(self, world: World, peer: int, what: str) -> None:
        self._world = world
        self._peer = peer
        self._what = what
        self._rank = world.rank

    @property
    def _is_cut(self) -> bool:
        return bool(self._world.cut & {self._peer, self._rank}) or self._peer in self._world.dead

    def _wait(self, is_there: Callable[[], bool], timeout: timedelta | None) -> None:
        limit = LIMIT if timeout is None else timeout.total_seconds()
        self._world.wait(lambda: is_there() or self._is_cut, self._what, limit)
        if not is_there():
            raise RuntimeError("Connection closed by peer")


class _Send(_Message):
    def __init__(self, world: World, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(world, peer, f"rank {peer} to receive what is sent under tag {tag}")
        self.tensor = tensor
        self.snapshot = _bytes(tensor)
        self._is_slice = tag >= serving._REPLY_TAGS
        self.receive: _Receive | None = None
        self.delivered = False

    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait(lambda: self.receive is not None, timeout)
        self.deliver()

    def deliver(self) -> None:
        assert self.receive is not None
        if not self.delivered:
            self.delivered = True
            if self._is_slice:
                self._world.laid[self.tensor.data_ptr()].check()
            if self._world.struck is None and _bytes(self.tensor) != self.snapshot:
                raise self._world.race("a tensor changed while it was being sent")
            self.receive.arrive(self)


class _Receive(_Message):
    def __init__(self, world: World, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(world, peer, f"rank {peer} to send under tag {tag}")
        self.tensor = tensor
        self.poison = _poison(tensor)
        self.send: _Send | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait(lambda: self.send is not None, timeout)
        assert self.send is not None
        self.send.deliver()

    def arrive(self, send: _Send) -> None:
        if self._world.struck is None and _bytes(self.tensor) != self.poison:
            raise self._world.race("memory was written to while a message was to arrive there")
        ctypes.memmove(self.tensor.data_ptr(), send.tensor.data_ptr(), send.tensor.nbytes)


class _ReceiveAny(_Message):
    """A message from whoever sends one."""

    def __init__(self, world: World, tensor: Tensor, group: Group, tag: int) -> None:
        super().__init__(world, world.rank, f"anybody's message under tag {tag}")
        self._tensor = tensor
        self._channels = [
            world.channels[group.ranks, peer, world.rank, tag] for peer in group.ranks if peer != world.rank
        ]

    def wait(self, timeout: timedelta | None = None) -> None:
        self._world.wait(lambda: any(channel.sent for channel in self._channels), self._what)
        able = [channel for channel in self._channels if channel.sent]
        send = able[self._world.choose_among(len(able))].sent.popleft()
        receive = _Receive(self._world, self._tensor, send._rank, 0)
        send.receive, receive.send = receive, send
        send.deliver()


# --- memory


class _Laid:
    """A slice on a shelf."""

    def __init__(self, world: World, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_there = True
        self._world = world
        self._snapshot = _bytes(tensor)

    def check(self) -> None:
        if not self.is_there:
            raise self._world.race("a slice was read that lay on the shelf no more: its owner may be writing")
        if _bytes(self.tensor) != self._snapshot:
            raise self._world.race("a slice was read that its owner has written to since it was laid out")


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _poison(tensor: Tensor) -> bytes:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    return _bytes(tensor)


# --- what stands in for torch, the kernel and the clock


class _Dist:
    """What onecopy calls in `torch.distributed`."""

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=_now.world.group(range(_now.world.size)))

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def get_backend(self, group: Group) -> str:
        return "gloo"

    def get_backend_config(self, group: Group) -> str:
        return "cpu:gloo"

    def isend(self, tensor: Tensor, *, group: Group, group_dst: int, tag: int) -> _Send:
        world, peer = _now.world, group.ranks[group_dst]
        self._check(peer)
        channel = world.channels[group.ranks, world.rank, peer, tag]
        channel.sent.append(message := _Send(world, tensor, peer, tag))
        channel.match(world)
        return message

    def irecv(self, tensor: Tensor, *, group: Group, group_src: int | None = None, tag: int) -> _Receive | _ReceiveAny:
        world = _now.world
        if group_src is None:
            return _ReceiveAny(world, tensor, group, tag)
        peer = group.ranks[group_src]
        self._check(peer)
        channel = world.channels[group.ranks, peer, world.rank, tag]
        channel.wanted.append(message := _Receive(world, tensor, peer, tag))
        channel.match(world)
        return message

    def _check(self, peer: int) -> None:
        world = _now.world
        world.give_way("post")
        if peer in world.dead or world.cut & {peer, world.rank}:
            raise RuntimeError("Connection closed by peer")

    def all_gather_object(self, objects: list[Any], own: Any, *, group: Group) -> None:
        world = _now.world
        ranks = group.ranks
        call = world.calls[ranks, world.rank]
        world.calls[ranks, world.rank] += 1
        world.objects[ranks, world.rank, call] = own

        def is_there() -> bool:
            return all((ranks, peer, call) in world.objects for peer in ranks)

        def is_cut() -> bool:
            return bool(world.cut & set(ranks)) or bool(world.dead & set(ranks))

        world.wait(lambda: is_there() or is_cut(), "objects of all ranks", LIMIT)
        if not is_there():
            raise RuntimeError("Connection closed by peer")
        objects[:] = [world.objects[ranks, peer, call] for peer in ranks]


class _Condition:
    """`threading.Condition`, where nobody runs beside the one who runs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        _now.world.wait(predicate, "a version to be laid out")


class _Segment(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Numbers:
    """Each rank counts for itself."""

    def __next__(self) -> int:
        return next(_now.world.numbers[_now.world.rank])


def _look_once(limit: float, complaint: str) -> Iterator[None]:
    yield
    raise AssertionError("a wait that virtual ranks do not know of")


@contextmanager
def virtually() -> Iterator[None]:
    """Whatever onecopy does inside the block, it does on virtual ranks. `World.run` is to be called here."""
    dist = _Dist()
    mailbox_wait, read_wait = mailbox.Mailbox.wait, shelf._Read.wait
    make_offer, make_fetch, take = cross_memory.Offer.__init__, cross_memory.Fetch.__init__, cross_memory.Fetch.wait
    offer_has_come, fetch_has_come = cross_memory.Offer.has_come, cross_memory.Fetch.has_come
    lay, clear, before_write = shelf.Shelf.lay, shelf.Shelf.clear, versions.Versions.before_write

    def process_vm_readv(process: int, here: int, _: int, there: int, *__: int) -> int:
        if not _now.world.can_read(process):
            return -1
        source = _Segment.from_address(there)
        _now.world.read(source.address, _Segment.from_address(here).address, source.nbytes)
        return source.nbytes  # type: ignore[no-any-return]

    def come_or_gone(look: Callable[[], bool]) -> bool:
        try:
            return look()
        except mailbox.PeerGone:
            return True

    def wait_for_note(self: Any, ticket: Any, limit: float) -> Any:
        peer = self.process - _FIRST_PROCESS
        _now.world.wait(lambda: come_or_gone(lambda: self.has_come(ticket)), f"a note from rank {peer}", limit)
        return mailbox_wait(self, ticket, limit)

    def wait_to_read(self: Any, timeout: timedelta | None = None) -> None:
        limit = LIMIT if timeout is None else timeout.total_seconds()
        owner = self._process - _FIRST_PROCESS
        _now.world.wait(
            lambda: come_or_gone(self.has_come), f"version {self._version} of a slice of rank {owner}", limit
        )
        read_wait(self, timeout)

    def offer(self: Any, tensor: Tensor, *rest: Any) -> None:
        _now.world.give_way("post")
        _now.world.offered[tensor.data_ptr()] = tensor, _bytes(tensor)
        _now.world.laid.pop(tensor.data_ptr(), None)
        make_offer(self, tensor, *rest)

    def fetch(self: Any, tensor: Tensor, *rest: Any) -> None:
        self._poison = _poison(tensor)
        make_fetch(self, tensor, *rest)

    def fetch_wait(self: Any, timeout: timedelta | None = None) -> None:
        if _now.world.struck is None and _bytes(self._tensor) != self._poison:
            raise _now.world.race("memory was written to while a message was to arrive there")
        take(self, timeout)

    def looked(has_come: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def look(self: Any) -> bool:
            _now.world.give_way("look")
            found = has_come(self)
            assert _now.world.current is not None
            _now.world.current.saw(found)
            return found

        return look

    def lay_out(self: Any, tensor: Tensor, version: int) -> None:
        _now.world.give_way("post")
        _now.world.laid[tensor.data_ptr()] = _Laid(_now.world, tensor)
        lay(self, tensor, version)

    def clear_away(self: Any) -> None:
        if self.laid is not None:
            _now.world.laid[self.laid.data_ptr()].is_there = False
        clear(self)
        _now.world.give_way("post")

    def begin_write(self: Any) -> None:
        before_write(self)
        if self.reads_freely:
            # Between this and the next `lay_out` slices change.
            _now.world.give_way("write")

    def thread(target: Callable[[], None], name: str, daemon: bool) -> Any:
        rank = _now.world.rank
        return SimpleNamespace(
            start=lambda: _now.world.start(rank, f"server of rank {rank}", target, main=False),
        )

    threads = SimpleNamespace(Thread=thread, Condition=lambda: _Condition())
    system = SimpleNamespace(environ={}, getpid=lambda: _now.world.process(_now.world.rank))
    with ExitStack() as stack:
        if gc.isenabled():
            # It would free graphs, and so end visits, in whichever rank it happens to run.
            gc.disable()
            stack.callback(gc.enable)

        def put(owner: Any, **values: Any) -> None:
            stack.enter_context(mock.patch.multiple(owner, **values))

        for module in (direct_exchange, serving, mesh, backends):
            put(module, dist=dist)
        put(serving, threading=threads)
        put(remote_memory, _process_vm_readv=lambda: process_vm_readv)
        put(cross_memory, os=system, platform=SimpleNamespace(machine=lambda: "x86_64"), _allow_reading=lambda: None)
        put(cross_memory, _boards=[])
        put(cross_memory.Offer, __init__=offer, has_come=looked(offer_has_come))
        put(cross_memory.Fetch, __init__=fetch, wait=fetch_wait, has_come=looked(fetch_has_come))
        put(mailbox, patiently=_look_once)
        put(mailbox.Mailbox, wait=wait_for_note)
        put(shelf, patiently=_look_once, _cards=[])
        put(shelf._Read, wait=wait_to_read)
        put(shelf.Shelf, lay=lay_out, clear=clear_away)
        put(versions.Versions, before_write=begin_write)
        put(collective, patience=lambda *_: nullcontext())
        put(api, _bucket_numbers=_Numbers())
        yield
