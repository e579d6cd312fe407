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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

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
from onecopy.sharding.engine import versions
from onecopy.sharding.setup import api
from virtual_gloo import Dist, Gloo, Send, bytes_of, poison
from virtual_world import LIMIT, Chooser, World, now

_FIRST_PROCESS = 5000


class Ranks(World):
    """Ranks with machines and sockets between them.

    Args:
        machines: for each rank the machine that it runs on; ranks on one machine read each other's memory.
        eager: messages over sockets are delivered as early as can be, else as late.
        settings: of a `World`.
    """

    def __init__(self, machines: Sequence[int], chooser: Chooser, *, eager: bool = True, **settings: Any) -> None:
        super().__init__(len(machines), chooser, **settings)
        # Kept for peers that may look at any time; those of an earlier run have ended.
        cross_memory._boards.clear()
        self.machines = tuple(machines)
        self.gloo = Gloo(self, eager=eager, on_delivery=self._delivers)
        self.numbers = [itertools.count() for _ in machines]
        self.offered: dict[int, tuple[Tensor, bytes]] = {}
        self.laid: dict[int, _Laid] = {}

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
        elif (
            (offer := self.offered.get(address)) is not None and self.struck is None and bytes_of(offer[0]) != offer[1]
        ):
            raise self.race("a tensor changed while it was on offer")
        ctypes.memmove(into, address, nbytes)

    def _delivers(self, message: Send) -> None:
        if message.tag >= serving._REPLY_TAGS and (laid := self.laid.get(message.tensor.data_ptr())) is not None:
            laid.check()


class _Laid:
    """A slice on a shelf."""

    def __init__(self, world: World, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_there = True
        self._world = world
        self._snapshot = bytes_of(tensor)

    def check(self) -> None:
        if not self.is_there:
            raise self._world.race("a slice was read that lay on the shelf no more: its owner may be writing")
        if bytes_of(self.tensor) != self._snapshot:
            raise self._world.race("a slice was read that its owner has written to since it was laid out")


class _Condition:
    """`threading.Condition`, where nobody runs beside the one who runs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        now.world.wait(predicate, "a version to be laid out")


class _Segment(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Numbers:
    """Each rank counts for itself."""

    def __next__(self) -> int:
        return next(now.world.numbers[now.world.rank])


def _look_once(limit: float, complaint: str) -> Iterator[int]:
    """`patiently`, where it is known before whether something has come."""
    yield 0
    raise RuntimeError(f"timed out: the peer {complaint} for {limit:.1f} s")


@contextmanager
def virtually() -> Iterator[None]:
    """Whatever onecopy does inside the block, it does on virtual ranks. `World.run` is to be called here."""
    dist = Dist()
    mailbox_wait, read_wait = mailbox.Mailbox.wait, shelf._Read.wait
    make_offer, make_fetch, take = cross_memory.Offer.__init__, cross_memory.Fetch.__init__, cross_memory.Fetch.wait
    offer_has_come, fetch_has_come = cross_memory.Offer.has_come, cross_memory.Fetch.has_come
    lay, clear, before_write = shelf.Shelf.lay, shelf.Shelf.clear, versions.Versions.before_write

    def process_vm_readv(process: int, here: int, _: int, there: int, *__: int) -> int:
        if not now.world.can_read(process):
            return -1
        source = _Segment.from_address(there)
        now.world.read(source.address, _Segment.from_address(here).address, source.nbytes)
        return source.nbytes  # type: ignore[no-any-return]

    def come_or_gone(look: Callable[[], bool]) -> bool:
        try:
            return look()
        except mailbox.PeerGone:
            return True

    def wait_for_note(self: Any, ticket: Any, limit: float) -> Any:
        peer = self.process - _FIRST_PROCESS
        now.world.wait(lambda: come_or_gone(lambda: self.has_come(ticket)), f"a note from rank {peer}", limit)
        return mailbox_wait(self, ticket, limit)

    def wait_to_read(self: Any, timeout: timedelta | None = None) -> None:
        limit = LIMIT if timeout is None else timeout.total_seconds()
        owner = self._mailbox.process - _FIRST_PROCESS
        now.world.wait(
            lambda: come_or_gone(self.has_come), f"version {self._version} of a slice of rank {owner}", limit
        )
        read_wait(self, timeout)

    def offer(self: Any, tensor: Tensor, *rest: Any) -> None:
        now.world.give_way("post")
        now.world.offered[tensor.data_ptr()] = tensor, bytes_of(tensor)
        now.world.laid.pop(tensor.data_ptr(), None)
        make_offer(self, tensor, *rest)

    def fetch(self: Any, tensor: Tensor, *rest: Any) -> None:
        self._poison = poison(tensor)
        make_fetch(self, tensor, *rest)

    def fetch_wait(self: Any, timeout: timedelta | None = None) -> None:
        if now.world.struck is None and bytes_of(self._tensor) != self._poison:
            raise now.world.race("memory was written to while a message was to arrive there")
        take(self, timeout)

    def looked(has_come: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def look(self: Any) -> bool:
            now.world.give_way("look")
            found = has_come(self)
            assert now.world.current is not None
            now.world.current.saw(found)
            return found

        return look

    def lay_out(self: Any, tensor: Tensor, version: int) -> None:
        now.world.give_way("post")
        now.world.laid[tensor.data_ptr()] = _Laid(now.world, tensor)
        lay(self, tensor, version)

    def clear_away(self: Any) -> None:
        if self.laid is not None:
            now.world.laid[self.laid.data_ptr()].is_there = False
        clear(self)
        now.world.give_way("post")

    def begin_write(self: Any) -> None:
        before_write(self)
        if self.reads_freely:
            # Between this and the next `lay_out` slices change.
            now.world.give_way("write")

    def thread(target: Callable[[], None], name: str, daemon: bool) -> Any:
        rank = now.world.rank
        return SimpleNamespace(
            start=lambda: now.world.start(rank, f"server of rank {rank}", target, main=False),
        )

    threads = SimpleNamespace(Thread=thread, Condition=lambda: _Condition())
    system = SimpleNamespace(environ={}, getpid=lambda: now.world.process(now.world.rank))
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
        put(shelf, patiently=_look_once)
        put(shelf._Read, wait=wait_to_read)
        put(shelf.Shelf, lay=lay_out, clear=clear_away)
        put(versions.Versions, before_write=begin_write)
        put(collective, patience=lambda *_, **__: nullcontext())
        put(mesh, patience=lambda *_, **__: nullcontext(), all_gather_objects=dist.all_gather_objects)
        put(api, _bucket_numbers=_Numbers())
        yield
