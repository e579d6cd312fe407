"""Mailbox: short notes between ranks on one machine, left in the writer's memory for the reader to fetch.

Each rank keeps one ring of notes for each peer. The writer puts a note into the next slot and then moves the head; the
reader looks at the head, copies what is new, and moves its own mark, which the writer looks at before it uses a slot
again. Nobody is woken: who waits, looks again, and lets others run in between.

    writer's memory   [mark of what it has read | head | slot 0 | slot 1 | …]   one such board for each peer
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from onecopy.comm.remote_memory import Window

Note = tuple[int, int, int, int]
"""What a note says: its subject, by which the reader asks for it, and three more numbers; 64 bits each."""

_SLOTS: Final = 256
_FIELDS: Final = 4
_NUMBER: Final = 8
"""Bytes of a number."""
_MARK, _HEAD, _FIRST = 0, 1, 2

# Numbers are stored one by one and whole, so that a peer never sees half of one. (struct.pack_into clears first.)
Board = ctypes.c_int64 * (_FIRST + _SLOTS * _FIELDS)
"""The memory for one peer."""

_DEPARTING: Final = 1 << 41
"""Subject of a rank's last note: its program has come to the end. Above all others."""

_LOOKS: Final = 50
"""How often a waiting rank looks before it sleeps in between."""

_LOOKS_BETWEEN: Final = 500
"""How often it looks, within some 150 ms, before it makes sure that all others are there."""


cut: Final = threading.Event()
"""Set by another thread to end every wait here with an error; whoever meets its peers anew clears it."""


class Ticket:
    """A place in the line for notes of one subject.

    Attributes:
        note: what came for it; None until then.
    """

    __slots__ = ("note",)

    def __init__(self) -> None:
        self.note: Note | None = None


class PeerGone(RuntimeError):
    """The peer's process has ended, or its memory cannot be read any more.

    Attributes:
        rank: its global rank, where it is not the one that was waited for.
    """

    def __init__(self, process: int, rank: int | None = None) -> None:
        super().__init__(f"the memory of process {process} cannot be read any more")
        self.rank = rank


class Disagreement(RuntimeError):
    """The peer is there, and its program is elsewhere. The text says what ``it`` has done."""


class Mailbox:
    """Notes to and from one peer.

    Args:
        board: this rank's memory for the peer.
        process: the peer's process id.
        address: of the peer's board for this rank, in the peer's memory.
        rank: the peer's global rank.
        group: filled with the mailboxes to all peers of the group, this one among them.
    """

    def __init__(
        self,
        board: ctypes.Array[ctypes.c_int64],
        process: int,
        address: int,
        rank: int,
        group: Sequence[Mailbox],
    ) -> None:
        self.process = process
        self._rank = rank
        self._group = group
        self._board = board
        self._address = address
        self._written = 0
        self._read = 0
        self._known_mark = 0
        self._has_departed = False
        self._unasked: defaultdict[int, deque[Note]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[Ticket]] = defaultdict(deque)
        self._copy = Board()
        self._top = Window(process, address, ctypes.addressof(self._copy), _FIRST * _NUMBER)

    @property
    def written(self) -> int:
        """How many notes this rank has left for the peer."""
        return self._written

    def write(self, note: Note, limit: float) -> None:
        """Leave a note. Waits, ``limit`` seconds at most, while the peer has a whole ring of notes to read."""
        if self._written - self._known_mark >= _SLOTS:
            for _ in patiently(limit, "reads no notes"):
                self._fetch()
                if self._written - self._known_mark < _SLOTS:
                    break
        slot = _FIRST + self._written % _SLOTS * _FIELDS
        self._board[slot : slot + _FIELDS] = list(note)
        self._written += 1
        self._board[_HEAD] = self._written

    def ask(self, subject: int) -> Ticket:
        """Line up for a note: those of one subject are given out in the order in which they were asked for."""
        ticket = Ticket()
        if unasked := self._unasked.get(subject):
            ticket.note = unasked.popleft()
        else:
            self._asked[subject].append(ticket)
        if not unasked:
            self._unasked.pop(subject, None)
        return ticket

    def wait(self, ticket: Ticket, limit: float) -> Note:
        """The ticket's note.

        Raises:
            PeerGone: if the peer has ended, or has left its last note.
            RuntimeError: if it does not come within ``limit`` seconds.
        """
        if ticket.note is None:
            for look in patiently(limit, "left no note"):
                if self.has_come(ticket):
                    break
                self.look_around(look)
        assert ticket.note is not None
        return ticket.note

    def has_come(self, ticket: Ticket) -> bool:
        """Whether the ticket's note is there. Raises `PeerGone` as `wait` does."""
        if ticket.note is None and not (self._fetch() and ticket.note is not None):
            if self._has_departed:
                raise PeerGone(self.process)
            return False
        return True

    def look_around(self, look: int) -> None:
        """Whoever waits long, now and then makes sure that the group's other processes are there.

        The peer that is waited for may wait for one that has ended, or may have met with its end already.

        Args:
            look: how often this rank has looked in this wait.

        Raises:
            PeerGone: if one of them has ended.
        """
        if look and look % _LOOKS_BETWEEN == 0:
            for mailbox in self._group:
                if not mailbox._top.read():
                    raise PeerGone(mailbox.process, mailbox._rank)

    def depart(self, limit: float) -> None:
        """Leave the last note: this rank's program is at its end."""
        self.write((_DEPARTING, 0, 0, 0), limit)

    def has_departed(self) -> bool:
        """Whether the peer has left its last note. Raises `PeerGone` if it has ended."""
        if not self._has_departed:
            self._fetch()
        return self._has_departed

    def wait_for_departure(self, limit: float) -> None:
        """Wait until the peer has left its last note, or has ended."""
        with suppress(PeerGone):
            for _ in patiently(limit, "goes on"):
                if self.has_departed():
                    return

    def _fetch(self) -> bool:
        """Take in what the peer has written. Returns whether there was anything."""
        if not self._top.read():
            raise PeerGone(self.process)
        self._known_mark, head = self._copy[_MARK], self._copy[_HEAD]
        if head == self._read:
            return False
        first, last = self._read % _SLOTS, (head - 1) % _SLOTS
        for start, stop in [(first, last + 1)] if first <= last else [(first, _SLOTS), (0, last + 1)]:
            offset = (_FIRST + start * _FIELDS) * _NUMBER
            nbytes = (stop - start) * _FIELDS * _NUMBER
            if not Window(self.process, self._address + offset, ctypes.addressof(self._copy) + offset, nbytes).read():
                raise PeerGone(self.process)
        for number in range(self._read, head):
            slot = _FIRST + number % _SLOTS * _FIELDS
            subject, second, third, fourth = self._copy[slot : slot + _FIELDS]
            note = (subject, second, third, fourth)
            if subject == _DEPARTING:
                self._has_departed = True
            elif asked := self._asked.get(subject):
                asked.popleft().note = note
            else:
                self._unasked[subject].append(note)
            if not self._asked.get(subject):
                self._asked.pop(subject, None)
        self._read = head
        self._board[_MARK] = head
        return True


def patiently(limit: float, complaint: str) -> Iterator[int]:
    """Give other processes the core between one look and the next, for longer the longer nothing comes.

    Yields how often it was looked.
    """
    deadline = time.monotonic() + limit
    looks = 0
    while True:
        yield looks
        looks += 1
        if cut.is_set():
            raise RuntimeError("cut: a rank is lost, and the others are to meet anew")
        if looks < _LOOKS:
            os.sched_yield()
        else:
            time.sleep(min(1e-3, 1e-6 * looks))
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out: the peer {complaint} for {limit:.1f} s")
