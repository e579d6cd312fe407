"""Shelf: a slice that lies ready for the other ranks of an axis, which fetch it whenever they want it.

The owner lays a tensor out under a version number and goes on with its own work. A reader waits until the owner has
laid that version out, and for nothing else that the owner does: neighbours copy the bytes out of the owner's memory
(`remote_memory.py`), others ask a thread of the owner's for them (`serving.py`).

    owner    lay(tensor, version) ─────────────────────────── … a barrier, then the tensor may change
    reader             fetch(peer, into, version)  fetch(…)

Who may change a laid-out tensor, and when, is decided by `sharding/engine/versions.py`; how long it lies there when the
model or the whole program is at its end, by `presence.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from onecopy.comm.collective import Posted, Program, Work
from onecopy.comm.cross_memory import seconds_of
from onecopy.comm.mailbox import Disagreement, Mailbox, PeerGone, patiently
from onecopy.comm.presence import Presence
from onecopy.comm.remote_memory import Window
from onecopy.comm.serving import Server
from onecopy.comm.transport import Lengths, Peers, slices_of

_VERSION, _ADDRESS, _NBYTES = range(3)
_FIELDS: Final = 3
_Card = ctypes.c_int64 * _FIELDS
"""What neighbours read first: which version lies where. The version is written last."""

_NUMBER: Final = 8

_CARDS: Final = 4096
"""Cards in a sheet."""

_sheets: Final[list[ctypes.Array[ctypes.c_int64]]] = []
"""Kept as long as the process lives, as a peer may look at any time. No card is used twice."""

_number_of_cards = itertools.count()

_CLOSED: Final = 1 << 62
"""In place of a version: nothing lies here any more."""


class _Board:
    """What this rank has on a shelf, and the card that tells neighbours of it. It outlives the model by `Presence`.

    Attributes:
        tensor: what is laid out; None before and after.
    """

    def __init__(self, number: int, server: Server | None) -> None:
        self.tensor: Tensor | None = None
        self._number = number
        self._server = server
        self._offers: list[object] = []
        sheet, place = divmod(next(_number_of_cards), _CARDS)
        if sheet == len(_sheets):
            _sheets.append((ctypes.c_int64 * (_FIELDS * _CARDS))())
        self._sheet, self._place = _sheets[sheet], _FIELDS * place

    @property
    def address(self) -> int:
        """Of the card."""
        return ctypes.addressof(self._sheet) + self._place * _NUMBER

    def lay(self, tensor: Tensor, version: int, uses: int) -> None:
        self.tensor = tensor
        self._sheet[self._place + _ADDRESS] = tensor.data_ptr()
        self._sheet[self._place + _NBYTES] = tensor.nbytes
        self._sheet[self._place + _VERSION] = version
        if self._server is not None:
            self._server.lay(self._number, tensor, version)
            self._offers = self._server.offer(self._number, tensor, version, uses)

    def clear(self) -> None:
        self.tensor = None
        self._offers = []
        if self._server is not None:
            self._server.clear(self._number)

    def close(self) -> None:
        """Let nobody read it any more."""
        self._sheet[self._place + _VERSION] = _CLOSED
        self.tensor = None
        self._offers = []
        if self._server is not None:
            self._server.close(self._number)


class Shelf:
    """The slices of one bucket on all ranks of an axis: this rank's own, and the way to the others.

    What is gathered in another dtype is cast on the way: by the owner before it goes through a socket, by the reader
    where it is copied out of the owner's memory. No cast copy lies about meanwhile.

    Args:
        peers: the axis.
        number: of the shelf, the same on every rank.
        server: answers the peers that are no neighbours; None if all are.
        presence: of this rank on the axis.
        uses: how often each rank is likely to fetch a version, the same on every rank. So often it need not ask.
    """

    def __init__(self, peers: Peers, number: int, server: Server | None, presence: Presence, uses: int) -> None:
        self._peers = peers
        self._number = number
        self._server = server
        self._uses = uses
        self._taken: Counter[int] = Counter()
        self._taken_version = 0
        self._own = _Board(number, server)
        self._addresses: dict[int, int] = {}
        weakref.finalize(self, presence.drop, self._own).atexit = False

    @property
    def address(self) -> int:
        """Where neighbours find this rank's card."""
        return self._own.address

    @property
    def laid(self) -> Tensor | None:
        """What this rank has laid out; None before `lay` and after `clear`."""
        return self._own.tensor

    def connect(self, addresses: Sequence[int]) -> None:
        """Learn the cards' addresses, in order of places."""
        self._addresses = {place: addresses[place] for place in self._peers.neighbours.mailboxes}

    def lay(self, tensor: Tensor, version: int) -> None:
        """Lay the contiguous ``tensor`` out. It must not change until no rank reads ``version`` any more."""
        self._own.lay(tensor, version, self._uses)

    def clear(self) -> None:
        """Forget what was laid out, once no rank reads it any more."""
        self._own.clear()

    def gather(self, whole: Tensor, version: int, lengths: Lengths = None) -> Program:
        """Fill the flat ``whole`` with every rank's slice of ``version``."""
        assert self.laid is not None, "a rank lays its own slice out before it gathers"
        slices = slices_of(whole, self._peers.size, lengths)
        fetched = [self._fetch(place, slices[place], version) for place in self._peers.others()]
        slices[self._peers.rank].copy_(self.laid)
        yield fetched

    def _fetch(self, place: int, into: Tensor, version: int) -> Posted:
        work: Work
        if place in self._addresses:
            assert self.laid is not None
            mailbox = self._peers.neighbours.mailboxes[place]
            card = self._addresses[place]
            work = _Read(mailbox, card, into, self.laid.dtype, version, self._peers.neighbours.limit)
        else:
            work = self._receive(place, into, version)
        return Posted(work, self._peers.ranks[place])

    def _receive(self, place: int, into: Tensor, version: int) -> Work:
        assert self._server is not None
        assert self.laid is not None
        if version != self._taken_version:
            self._taken_version = version
            self._taken.clear()
        use = self._taken[place]
        if use < self._uses and into.dtype == self.laid.dtype:
            self._taken[place] += 1
            return self._server.take(place, self._number, into, version, use)
        return self._server.ask(place, self._number, into, version)


class _Read:
    """A neighbour's slice, copied out of its memory by `wait`."""

    def __init__(
        self, mailbox: Mailbox, card: int, into: Tensor, dtype: torch.dtype, version: int, limit: float
    ) -> None:
        self._mailbox = mailbox
        self._limit = limit
        self._into = into
        self._dtype = dtype
        self._version = version
        self._card = _Card()
        self._window = Window(mailbox.process, card, ctypes.addressof(self._card), len(self._card) * _NUMBER)

    def wait(self, timeout: timedelta | None = None) -> None:
        for look in patiently(seconds_of(timeout, self._limit), "has not written its parameters as often as this rank"):
            if self.has_come():
                break
            self._mailbox.look_around(look)
            # What a rank lays out before it leaves is there once it has left.
            if self._mailbox.has_departed() and not self.has_come():
                raise PeerGone(self._mailbox.process)
        self._check()
        _, address, nbytes = self._card
        into = self._into
        if into.dtype != self._dtype:
            into = torch.empty_like(into, dtype=self._dtype)
        if nbytes != into.nbytes:
            raise Disagreement(
                f"{into.nbytes} bytes were expected; found {nbytes}. The ranks do not run the same model or the same "
                "steps"
            )
        if not Window(self._mailbox.process, address, into.data_ptr(), nbytes).read():
            raise PeerGone(self._mailbox.process)
        # It may have been taken away meanwhile.
        self._look()
        self._check()
        if into is not self._into:
            self._into.copy_(into)

    def has_come(self) -> bool:
        """Whether the slice can be copied, or never will be."""
        self._look()
        return self._card[_VERSION] >= self._version

    def _look(self) -> None:
        if not self._window.read():
            raise PeerGone(self._mailbox.process)

    def _check(self) -> None:
        found = self._card[_VERSION]
        if found == _CLOSED:
            raise Disagreement(
                "it has deleted its model, which this rank still uses: keep the model on every rank as long as one "
                "uses it"
            )
        if found > self._version:
            raise Disagreement(
                f"it has written its parameters {found} times and this rank {self._version} times: every rank must "
                f"make the same optimizer steps and the same edits of parameters"
            )
