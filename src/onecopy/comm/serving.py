"""Server: a thread that hands out what this rank has laid out (`shelf.py`) to ranks that cannot read its memory.

It blocks in gloo, outside of Python's lock, until a request comes; gloo's own thread then moves the bytes. So a slice
leaves this rank whatever its main thread is doing. What every reader is likely to want is offered beforehand, and then
gloo's thread alone hands it out; what nobody has taken when the slice changes is withdrawn.

    owner    offers posted: slice, version, use ──▶      gloo's thread: the reader is there ──▶ slice
    reader   receive posted
    reader   receive posted, request ──▶ owner's thread: is that version laid out? ──▶ slice
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import PeerUnreachable, Work
from onecopy.comm.transport import Peers

_REQUEST_TAG: Final = (1 << 24) - 8
_FAREWELL_TAG: Final = _REQUEST_TAG - 1
_REPLY_TAGS: Final = 1 << 28
"""Answers' tags begin here, above those of collectives."""

_OFFER_TAGS: Final = 1 << 29
_OFFERS: Final = 1 << 26
_STRIDE: Final = 1 << 16
"""Offers of the next version have other tags. A thousand versions later they begin anew (`_OFFERS`)."""

_USES: Final = 4
"""Above the number of times that a slice is offered to a rank."""

_DTYPES: Final = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
"""In which slices may be asked for; a request names one by its place here, which is the same on every rank."""

_DEPARTING: Final = -1
_DONE: Final = -2
_FAILING: Final = -3
"""In a request in place of a shelf's number: who sends it has come to the end of its program (`presence.py`), or asks
for nothing any more, or ends with an error and is to be asked for nothing any more."""

_REPLIES: Final = 1 << 24
_A_MOMENT: Final = 1.0
_FOR_EVER: Final = timedelta(days=365)
"""A request may be long in coming, and gloo closes all connections when a wait runs out."""


class Server:
    """Hands out slices on one process group. There is one for each group, whatever the number of models.

    Args:
        group: a gloo group.
        place: this rank's place on it.
        ranks: the global rank at each place.
        distant: the places that may ask.

    Attributes:
        departing: places of ranks that have come to the end of their program, and hand out slices still.
    """

    def __init__(self, group: dist.ProcessGroup, place: int, ranks: tuple[int, ...], distant: Collection[int]) -> None:
        self.distant = frozenset(distant)
        self.departing: set[int] = set()
        self._done: set[int] = set()
        self._dismissed: set[int] = set()
        # Its own methods are called: torch.distributed's functions refuse a group that was destroyed, which a program
        # may do while others still read.
        self._group = group
        self._place = place
        self._ranks = ranks
        # Weak: how long slices of a dropped model lie here is for `Presence` to say.
        self._laid: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._closed: set[int] = set()
        self._changed = threading.Condition()
        self._replies = itertools.count()
        self._said: list[tuple[dist.Work, Tensor]] = []
        self._thread = threading.Thread(target=self._serve, name="onecopy-server", daemon=True)
        self._thread.start()

    def lay(self, number: int, tensor: Tensor, version: int) -> None:
        with self._changed:
            self._laid[number] = (version, weakref.ref(tensor))
            self._changed.notify_all()

    def clear(self, number: int) -> None:
        with self._changed:
            self._laid.pop(number, None)

    def close(self, number: int) -> None:
        """As `clear`, for good: who asks gets no answer."""
        with self._changed:
            self._laid.pop(number, None)
            self._closed.add(number)
            self._changed.notify_all()

    def offer(self, number: int, tensor: Tensor, version: int, uses: int) -> list[object]:
        """Let each peer take ``tensor`` ``uses`` times without asking.

        Returns:
            What withdraws the offers where it is dropped.
        """
        offers: list[object] = []
        for use in range(uses):
            for place in self.distant:
                # A peer that is gone takes nothing.
                with suppress(RuntimeError):
                    offers.append(self._group.send([tensor], place, _offer_tag(number, version, use)))
        return offers

    def take(self, place: int, number: int, into: Tensor, version: int, use: int) -> Work:
        """Receive in ``into`` what the rank at ``place`` has offered, or will offer."""
        try:
            received = self._group.recv([into], place, _offer_tag(number, version, use))
        except RuntimeError as error:
            raise PeerUnreachable(self._ranks[place]) from error
        return _Asked(received, None)

    def ask(self, place: int, number: int, into: Tensor, version: int) -> Work:
        """Ask the rank at ``place`` for its slice on shelf ``number``, to be received in ``into``."""
        reply = _REPLY_TAGS + next(self._replies) % _REPLIES
        request = torch.tensor([self._place, number, version, reply, _DTYPES.index(into.dtype)])
        try:
            received = self._group.recv([into], place, reply)
            asked = self._group.send([request], place, _REQUEST_TAG)
        except RuntimeError as error:
            raise PeerUnreachable(self._ranks[place]) from error
        return _Asked(received, (asked, request))

    def depart(self, place: int) -> Callable[[float], None]:
        """Tell the rank at ``place`` that this one's program is at its end.

        Returns:
            What waits, for so many seconds at most, until that one's is too, or it has ended, or `dismiss`es this one.
        """
        word = torch.zeros(1)
        try:
            received = self._group.recv([word], place, _FAREWELL_TAG)
        except RuntimeError:
            return lambda _: None
        self._say(place, _DEPARTING)
        return partial(_wait, received, word)

    def dismiss(self, place: int) -> None:
        """Tell the rank at ``place``, once, that it need not stay for this one any more."""
        if place not in self._dismissed:
            self._dismissed.add(place)
            self._say(place, _DONE)

    def _say(self, place: int, word: int) -> None:
        request, farewell = torch.tensor([self._place, word, 0, 0, 0]), torch.zeros(1)
        with suppress(RuntimeError):
            self._said.append((self._group.send([request], place, _REQUEST_TAG), request))
            self._said.append((self._group.send([farewell], place, _FAREWELL_TAG), farewell))

    def abandon(self) -> None:
        """This rank's program ends with an error: let the thread end as soon as those who are still there answer."""
        for place in self.distant:
            request = torch.tensor([self._place, _FAILING, 0, 0, 0])
            try:
                self._said.append((self._group.send([request], place, _REQUEST_TAG), request))
            except RuntimeError:
                self._done.add(place)
        self.end()

    def end(self) -> None:
        """Let the thread end, once no peer asks any more: if it is in gloo when the interpreter ends, that aborts.

        A peer that has died does not say so, and is not waited for.
        """
        self._thread.join(_A_MOMENT)

    def _serve(self) -> None:
        request = torch.zeros(5, dtype=torch.int64)
        under_way: deque[tuple[dist.Work, Tensor]] = deque()
        try:
            while self._done < self.distant:
                self._group.recv_anysource([request], _REQUEST_TAG).wait(_FOR_EVER)
                place, number, version, reply, dtype = request.tolist()
                if number < 0:
                    self._done.add(place)
                    if number == _DEPARTING:
                        self.departing.add(place)
                    elif number == _FAILING:
                        self.dismiss(place)
                    continue
                if (laid := self._wait_for(number, version)) is None:
                    continue
                tensor = laid.to(_DTYPES[dtype])
                # Who asked may be gone. Others still need what they ask for, to come where they notice it.
                with suppress(RuntimeError):
                    under_way.append((self._group.send([tensor], place, reply), tensor))
                while len(under_way) >= len(self._ranks):
                    with suppress(RuntimeError):
                        under_way.popleft()[0].wait()
        except RuntimeError:
            # No requests come any more. The main thread's own messages fail too, and say whose.
            return

    def _wait_for(self, number: int, version: int) -> Tensor | None:
        """What lies on a shelf under ``version``; None if nothing will lie there any more."""
        found: Tensor | None = None

        def is_there() -> bool:
            nonlocal found
            laid, tensor = self._laid.get(number, (0, None))
            found = tensor() if tensor is not None and laid == version else None
            return found is not None or number in self._closed

        with self._changed:
            self._changed.wait_for(is_there)
        return found


def _offer_tag(number: int, version: int, use: int) -> int:
    return _OFFER_TAGS + ((version * _STRIDE + number) % _OFFERS) * _USES + use


def _wait(received: dist.Work, into: Tensor, seconds: float) -> None:
    """Wait for what comes into ``into``, which is kept as long."""
    received.wait(timedelta(seconds=seconds))


class _Asked:
    """A slice that was asked for or offered. Keeps the request's memory until the answer is there."""

    is_served: Final = True
    """A rank at the end of its program still hands it out."""

    def __init__(self, received: dist.Work, request: tuple[object, Tensor] | None) -> None:
        self._received = received
        self._request = request

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._received.wait()
        else:
            self._received.wait(timeout)


_servers: Final[dict[dist.ProcessGroup, Server]] = {}
"""As long as their groups are in use, like their threads."""


def server_of(peers: Peers) -> Server | None:
    """The group's server; it starts with the first call. None if all are neighbours."""
    distant = set(peers.others()) - set(peers.neighbours.mailboxes)
    if distant and peers.group not in _servers:
        _servers[peers.group] = Server(peers.group, peers.rank, peers.ranks, distant)
    return _servers.get(peers.group)


def forget_server(group: dist.ProcessGroup) -> None:
    """The group's connections are closed, which ends its server's thread."""
    _servers.pop(group, None)
