"""Server: a thread that hands out what this rank has laid out (`shelf.py`) to ranks that cannot read its memory.

It blocks in gloo, outside of Python's lock, until a request comes; gloo's own thread then moves the bytes. So a slice
leaves this rank whatever its main thread is doing.

    reader   receive posted, request ──▶ owner's thread: is that version laid out? ──▶ slice
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import PeerUnreachable, Work

_REQUEST_TAG: Final = (1 << 24) - 8
_REPLY_TAGS: Final = 1 << 28
"""Answers' tags begin here, above those of collectives."""

_DTYPES: Final = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
"""In which slices may be asked for; a request names one by its place here, which is the same on every rank."""

_REPLIES: Final = 1 << 24
_FOR_EVER: Final = timedelta(days=365)
"""A request may be long in coming, and gloo closes all connections when a wait runs out."""


class Server:
    """Hands out slices on one process group. There is one for each group, whatever the number of models.

    Args:
        group: a gloo group.
        place: this rank's place on it.
        ranks: the global rank at each place.
    """

    def __init__(self, group: dist.ProcessGroup, place: int, ranks: tuple[int, ...]) -> None:
        # Weak, or the group would live as long as the process.
        self._group = weakref.ref(group)
        self._place = place
        self._ranks = ranks
        # Weak, or a model that was dropped would keep its slices here.
        self._laid: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._changed = threading.Condition()
        self._replies = itertools.count()
        threading.Thread(target=self._serve, name="onecopy-server", daemon=True).start()

    def lay(self, number: int, tensor: Tensor, version: int) -> None:
        with self._changed:
            self._laid[number] = (version, weakref.ref(tensor))
            self._changed.notify_all()

    def clear(self, number: int) -> None:
        with self._changed:
            self._laid.pop(number, None)

    def ask(self, place: int, number: int, into: Tensor, version: int) -> Work:
        """Ask the rank at ``place`` for its slice on shelf ``number``, to be received in ``into``."""
        group = self._group()
        reply = _REPLY_TAGS + next(self._replies) % _REPLIES
        request = torch.tensor([self._place, number, version, reply, _DTYPES.index(into.dtype)])
        try:
            received = dist.irecv(into, group=group, group_src=place, tag=reply)
            asked = dist.isend(request, group=group, group_dst=place, tag=_REQUEST_TAG)
        except RuntimeError as error:
            raise PeerUnreachable(self._ranks[place]) from error
        assert received is not None
        return _Asked(received, (asked, request))

    def _serve(self) -> None:
        request = torch.zeros(5, dtype=torch.int64)
        under_way: deque[tuple[dist.Work, Tensor]] = deque()
        try:
            while (group := self._group()) is not None:
                asked = dist.irecv(request, group=group, tag=_REQUEST_TAG)
                assert asked is not None
                del group
                asked.wait(_FOR_EVER)
                place, number, version, reply, dtype = request.tolist()
                tensor = self._wait_for(number, version).to(_DTYPES[dtype])
                # Who asked may be gone. Others still need what they ask for, to come where they notice it.
                with suppress(RuntimeError):
                    sent = dist.isend(tensor, group=self._group(), group_dst=place, tag=reply)
                    assert sent is not None
                    under_way.append((sent, tensor))
                while len(under_way) >= len(self._ranks):
                    with suppress(RuntimeError):
                        under_way.popleft()[0].wait()
        except RuntimeError:
            # No requests come any more. The main thread's own messages fail too, and say whose.
            return

    def _wait_for(self, number: int, version: int) -> Tensor:
        found: Tensor | None = None

        def is_there() -> bool:
            nonlocal found
            laid, tensor = self._laid.get(number, (0, None))
            found = tensor() if tensor is not None and laid == version else None
            return found is not None

        with self._changed:
            self._changed.wait_for(is_there)
        assert found is not None
        return found


class _Asked:
    """A slice that was asked for. Keeps the request's memory until the answer is there."""

    def __init__(self, received: dist.Work, request: tuple[object, Tensor]) -> None:
        self._received = received
        self._request = request

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._received.wait()
        else:
            self._received.wait(timeout)


_servers: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, Server]] = weakref.WeakKeyDictionary()


def server_of(group: dist.ProcessGroup, place: int, ranks: tuple[int, ...]) -> Server:
    """The group's server; it starts with the first call."""
    server = _servers.get(group)
    if server is None:
        server = _servers[group] = Server(group, place, ranks)
    return server
