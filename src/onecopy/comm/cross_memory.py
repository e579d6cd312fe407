"""Cross-memory attach: ranks on one machine read each other's buffers, instead of pushing them through sockets.

A message to such a peer is a note (`mailbox.py`) with an address. The receiver has the kernel copy the bytes over once,
straight into place (`remote_memory.py`), and notes that it has them; until then the sender's buffer must stay as it is:

    sender    offer: address, bytes ──▶             ◀── taken
    receiver                          copies the bytes

A socket copies each byte twice and wakes two more threads; NCCL and MPI go the same way inside a machine. Which peers
can be reached so is found out by trying (`find_neighbours`); the others keep their sockets (`transport.py`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch import Tensor

from onecopy.comm.mailbox import Board, Disagreement, Mailbox, PeerGone
from onecopy.comm.remote_memory import Window

SWITCH: Final = "ONECOPY_CROSS_MEMORY"
"""Environment variable: "0" sends everything through sockets, as between machines."""

_SECRET: Final = 16
_TAKEN: Final = 1 << 40
"""Added to an offer's number for the answer to it; above every tag."""

_boards: Final[list[ctypes.Array[ctypes.c_int64]]] = []
"""Kept as long as the process lives: a peer may still look for the last note when the group here is gone."""


@dataclass(frozen=True)
class Neighbours:
    """The peers on one axis whose memory this rank can read, and who can read this rank's.

    Attributes:
        mailboxes: by the peer's place.
        limit: seconds that a message may take.
    """

    mailboxes: Mapping[int, Mailbox] = field(default_factory=dict)
    limit: float = 0.0

    def reach(self, peer: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` goes to and comes from the place ``peer`` this way."""
        return peer in self.mailboxes and tensor.is_cpu

    def offer(self, tensor: Tensor, peer: int, tag: int) -> Offer:
        return Offer(tensor, self.mailboxes[peer], tag, self.limit)

    def fetch(self, tensor: Tensor, peer: int, tag: int) -> Fetch:
        return Fetch(tensor, self.mailboxes[peer], tag, self.limit)


class Offer:
    """A contiguous tensor that a peer may take. ``wait`` returns when it has; until then it must not change."""

    def __init__(self, tensor: Tensor, mailbox: Mailbox, tag: int, limit: float) -> None:
        self._tensor = tensor
        self._mailbox = mailbox
        self._limit = limit
        # By number and not by tag: a collective that is given up takes no later one's answer.
        number = mailbox.written
        self._taken = mailbox.ask(_TAKEN + number)
        mailbox.write((tag, tensor.data_ptr(), tensor.nbytes, number), limit)

    def wait(self, timeout: timedelta | None = None) -> None:
        # Who is gone reads no more; if it left too early, what this rank has to receive from it will tell.
        with suppress(PeerGone):
            self._mailbox.wait(self._taken, seconds_of(timeout, self._limit))

    def has_come(self) -> bool:
        """Whether the peer has come for it."""
        with suppress(PeerGone):
            return self._mailbox.has_come(self._taken)
        return True


class Fetch:
    """A contiguous tensor to be filled from a peer's offer. ``wait`` copies it."""

    def __init__(self, tensor: Tensor, mailbox: Mailbox, tag: int, limit: float) -> None:
        self._tensor = tensor
        self._mailbox = mailbox
        self._limit = limit
        self._offered = mailbox.ask(tag)

    def wait(self, timeout: timedelta | None = None) -> None:
        mailbox, tensor = self._mailbox, self._tensor
        _, address, nbytes, number = mailbox.wait(self._offered, seconds_of(timeout, self._limit))
        if nbytes != tensor.nbytes:
            raise Disagreement(
                f"{tensor.nbytes} bytes were expected; found {nbytes}. The ranks do not run the same model or the "
                "same steps"
            )
        if not Window(mailbox.process, address, tensor.data_ptr(), nbytes).read():
            raise PeerGone(mailbox.process)
        mailbox.write((_TAKEN + number, 0, 0, 0), self._limit)

    def has_come(self) -> bool:
        """Whether the peer's offer is there and ``wait`` has only to copy; or the peer is gone, as it then says."""
        with suppress(PeerGone):
            return self._mailbox.has_come(self._offered)
        return True


def find_neighbours(
    place: int, ranks: Sequence[int], exchange: Callable[[object], list[object]], limit: float
) -> Neighbours:
    """The peers that can be reached through memory. A collective call.

    Args:
        place: this rank's place on the axis.
        ranks: the global rank at each place.
        exchange: every rank's object, in order of places.
        limit: seconds that a message may take.
    """
    # Notes rely on stores being seen in their order, which other processors do not promise.
    enabled = os.environ.get(SWITCH, "1") != "0" and platform.machine() == "x86_64"
    if enabled:
        _allow_reading()
    # Process ids mean nothing across containers, where another process may have the same one: so a secret is read.
    secret = ctypes.create_string_buffer(secrets.token_bytes(_SECRET), _SECRET)
    own = (os.getpid(), ctypes.addressof(secret), secret.raw) if enabled else None
    cards: list[tuple[int, int, bytes] | None] = exchange(own)  # type: ignore[assignment]
    boards: dict[int, ctypes.Array[ctypes.c_int64]] = {
        peer: Board()
        for peer, card in enumerate(cards)
        if card is not None and enabled and peer != place and _can_read(*card)
    }
    _boards.extend(boards.values())
    addresses = {peer: ctypes.addressof(board) for peer, board in boards.items()}
    others: list[dict[int, int]] = exchange(addresses)  # type: ignore[assignment]
    group: list[Mailbox] = []
    mailboxes = {
        peer: Mailbox(board, card[0], others[peer][place], ranks[peer], group)
        for peer, board in boards.items()
        if (card := cards[peer]) is not None and place in others[peer]
    }
    group.extend(mailboxes.values())
    return Neighbours(mailboxes, limit)


def _allow_reading() -> None:
    """Where the Yama module keeps processes apart (Ubuntu's default), let those of this user read this one's memory.

    Without Yama they may anyway. MPI libraries ask for the same.
    """
    with suppress(OSError, AttributeError):
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            set_ptracer, any_process = 0x59616D61, -1
            ctypes.CDLL(None).prctl(set_ptracer, ctypes.c_long(any_process), 0, 0, 0)


def seconds_of(timeout: timedelta | None, limit: float) -> float:
    """How long to wait: ``timeout``, or ``limit`` where nothing is said."""
    return limit if timeout is None else timeout.total_seconds()


def _can_read(process: int, address: int, secret: bytes) -> bool:
    found = ctypes.create_string_buffer(_SECRET)
    return Window(process, address, ctypes.addressof(found), _SECRET).read() and found.raw == secret
