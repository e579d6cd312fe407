"""Pool: memory into which pages are brought, of at most so many bytes, aligned for direct I/O.

All that one model keeps in files shares one pool, states and activations: they move at different times of a step.
Memory is mapped and private, so that it goes back to the system whole, and counts as the process's own.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Final

import torch
from torch import Tensor

from onecopy.memory.store.files import round_up

SLOTS: Final = 3
"""How many of the largest things that move may be in memory at a time: one is read, one used, one written."""


class Cancelled(Exception):
    """Whoever waited for memory is not to have it any more."""


class Pool:
    """Lends buffers; whoever asks for more than there is waits until some is given back.

    Args:
        on_change: told how many bytes were mapped (positive) or let go.
    """

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        self._limit = 0
        self._on_change = on_change
        self._held = 0
        self._lent = 0
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._changed = Condition()
        self._is_cancelled = False

    @staticmethod
    def room_for(sizes: Iterable[int]) -> int:
        """Bytes that buffers for so many bytes each take together."""
        return sum(_size_of(nbytes) for nbytes in sizes)

    def allow(self, nbytes: int) -> None:
        """Raise the limit to ``nbytes``, if it is lower. What was cancelled may begin anew."""
        with self._changed:
            self._limit = max(self._limit, nbytes)
            self._is_cancelled = False

    def take(self, nbytes: int) -> Tensor:
        """A buffer of whole blocks with room for ``nbytes``, uint8, its content undefined. Waits for room.

        Raises:
            Cancelled: if `cancel` was called meanwhile.
        """
        nbytes = _size_of(nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self._has_room(nbytes))
            if self._is_cancelled:
                raise Cancelled
            return self._lend(nbytes)

    def take_now(self, nbytes: int) -> Tensor | None:
        """As `take`, but None where there is no room at the moment."""
        nbytes = _size_of(nbytes)
        with self._changed:
            return self._lend(nbytes) if self._has_room(nbytes) else None

    def _lend(self, nbytes: int) -> Tensor:
        self._lent += nbytes
        if self._idle[nbytes]:
            return self._idle[nbytes].pop()
        for size in list(self._idle):
            while self._idle[size] and self._held + nbytes > self._limit:
                self._idle[size].pop()
                self._count(-size)
        self._count(nbytes)
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Give back what `take` has lent."""
        with self._changed:
            self._lent -= buffer.nbytes
            self._idle[buffer.nbytes].append(buffer)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Let whoever waits give up."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return self._lent == 0 or self._lent + nbytes <= self._limit

    def _count(self, nbytes: int) -> None:
        self._held += nbytes
        if self._on_change is not None:
            self._on_change(nbytes)


def _size_of(nbytes: int) -> int:
    return max(round_up(nbytes), mmap.PAGESIZE)
