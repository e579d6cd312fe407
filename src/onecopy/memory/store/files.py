"""File: one file of a rank's own, without a name, read and written by several threads past the page cache.

A file without a name is gone when its process is, however that ends. Where the file system cannot make one, a file is
made in a directory of its own and loses its name at once; what a process killed in between leaves, the next one clears.
Room that is given back is given out again, zeroed.

Bytes move by direct I/O where the file system has it, else through the page cache. Direct I/O wants blocks of 4096
bytes, in memory too: what is aligned is moved straight, all else through one buffer of each thread. A request is cut
into pieces, so several are under way at a time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Final

from torch import Tensor

from onecopy.errors import OffloadError

BLOCK: Final = 4096
"""Bytes. What direct I/O wants addresses, places and lengths to be multiples of."""

_PIECE: Final = 4 * 2**20
"""Bytes of one request. Four threads with such pieces reach what fio does with as many."""

_THREADS: Final = 4
_PREFIX: Final = "onecopy-states-"
_ATTEMPTS: Final = 8
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

Booked = Callable[[float, float], None]
"""Told of the end of a transfer: seconds from issue to end, and seconds that somebody waited for it."""

Booking = Callable[[str, int], Booked]
"""Told of a transfer that begins: "to disk" or "from disk", and its bytes."""


def round_up(nbytes: int) -> int:
    """To whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Transfer:
    """Bytes under way between memory and a file. The memory must stay as it is until the end.

    Args:
        keep: what holds the memory.
    """

    def __init__(self, pieces: Sequence[Future[float]], keep: object, booked: Booked | None) -> None:
        self._pieces = pieces
        self._keep = keep
        self._booked = booked
        self._began = perf_counter()
        self._lock = threading.Lock()
        self._followed: threading.Event | None = None

    def then(self, do: Callable[[], None]) -> None:
        """Call ``do`` at the end, well or not, in whichever thread brings it about."""
        if not self._pieces:
            do()
            return
        left = [len(self._pieces)]
        followed = self._followed = threading.Event()

        def ended(_: Future[float]) -> None:
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if last:
                do()
                followed.set()

        for piece in self._pieces:
            piece.add_done_callback(ended)

    def wait(self) -> None:
        """Wait for the end, and for what `then` was given.

        Raises:
            OffloadError: if a piece could not be moved. All others have ended then too.
        """
        waited = perf_counter()
        errors = [error for piece in self._pieces if (error := piece.exception()) is not None]
        ended = max((piece.result() for piece in self._pieces), default=waited) if not errors else waited
        if self._followed is not None:
            # Futures tell who waits before those who are called.
            self._followed.wait()
        if self._booked is not None:
            self._booked(ended - self._began, perf_counter() - waited)
        self._booked = self._keep = None
        if errors:
            raise errors[0]


class Room:
    """What of a file was given back: where each free stretch begins, and its bytes. Neighbours become one stretch.

    It may be told so by any thread, for any thread may collect garbage, inside these methods too.
    """

    def __init__(self) -> None:
        self._free: dict[int, int] = {}
        self._given: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._lock = threading.Lock()

    def give(self, start: int, nbytes: int) -> None:
        """The ``nbytes`` from ``start`` on are free. Nothing is under way to or from them."""
        self._given.put((start, nbytes))

    def take(self, nbytes: int) -> int | None:
        """Where the first free stretch of ``nbytes`` begins, which is no longer free; None if there is none."""
        with self._lock:
            while not self._given.empty():
                self._join(*self._given.get())
            for start in sorted(self._free):
                if (left := self._free[start] - nbytes) >= 0:
                    del self._free[start]
                    if left:
                        self._free[start + nbytes] = left
                    return start
        return None

    def _join(self, start: int, nbytes: int) -> None:
        for other, length in list(self._free.items()):
            if start in (other + length, other - nbytes):
                del self._free[other]
                start, nbytes = min(start, other), nbytes + length
        self._free[start] = nbytes


class File:
    """See the file's first lines.

    Args:
        directory: where it lies; made if it is missing.
        booking: told of each transfer.

    Attributes:
        is_direct: whether bytes move past the page cache.
        size: bytes that it holds.
        room: what of them was given back, for `extend` to give out again.

    Raises:
        OffloadError: if no file can be made there.
    """

    def __init__(self, directory: Path, booking: Booking | None = None) -> None:
        self.directory = directory
        self.size = 0
        self._booking = booking
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._handle = _open_unnamed(directory)
        except OSError as error:
            raise OffloadError(
                error.errno,
                f"offload cannot make a file in {str(directory)!r}: {error.strerror}; give a directory in which it "
                "can write",
            ) from None
        self.is_direct = bool(fcntl.fcntl(self._handle, fcntl.F_GETFL) & _DIRECT)
        self.room = Room()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="onecopy-files")
        self._own = threading.local()
        self._edges = threading.Lock()

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", -1)) >= 0:
            self._threads.shutdown(wait=True)
            os.close(handle)

    def extend(self, nbytes: int, *, zeroed: bool = True) -> int:
        """Reserve ``nbytes``: what was given back first, else more.

        Args:
            zeroed: they read as zeros until they are written; otherwise as anything.

        Returns where they begin.

        Raises:
            OffloadError: if there is no room.
        """
        start, nbytes = self.size, round_up(nbytes)
        if not nbytes:
            return start
        if (free := self.room.take(nbytes)) is not None:
            if zeroed:
                self._clear(free, nbytes)
            return free
        try:
            os.posix_fallocate(self._handle, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise self._error("reserve", nbytes, start, error) from None
            # A full disk is told when bytes are written.
            os.ftruncate(self._handle, start + nbytes)
        self.size += nbytes
        if self.is_direct and not start:
            self._probe()
        return start

    def _clear(self, start: int, nbytes: int) -> None:
        buffer = self._buffer()
        ctypes.memset(buffer, 0, min(nbytes, _PIECE))
        for position in range(start, start + nbytes, _PIECE):
            self._move("write", buffer, position, min(_PIECE, start + nbytes - position))

    def read(self, into: Tensor, start: int) -> Transfer:
        """Fill the contiguous CPU tensor ``into`` with the bytes from ``start`` on."""
        return self._issue("from disk", into, start)

    def write(self, source: Tensor, start: int) -> Transfer:
        """Write the contiguous CPU tensor ``source`` from ``start`` on."""
        return self._issue("to disk", source, start)

    def _issue(self, op: str, memory: Tensor, start: int) -> Transfer:
        assert memory.is_contiguous()
        assert memory.device.type == "cpu"
        address, nbytes = memory.data_ptr(), memory.nbytes
        pieces = []
        position = start
        while position < start + nbytes:
            stop = min(start + nbytes, (position // _PIECE + 1) * _PIECE)
            work = self._read_piece if op == "from disk" else self._write_piece
            pieces.append(self._threads.submit(work, address + position - start, position, stop - position))
            position = stop
        return Transfer(pieces, memory, self._booking(op, nbytes) if self._booking is not None else None)

    # --- in the threads

    def _read_piece(self, address: int, start: int, nbytes: int) -> float:
        head, body, tail = self._cut(address, start, nbytes)
        for offset, length in (head, tail):
            if length:
                buffer = self._buffer()
                low = (start + offset) // BLOCK * BLOCK
                self._move("read", buffer, low, round_up(start + offset + length - low))
                ctypes.memmove(address + offset, buffer + start + offset - low, length)
        if body[1]:
            self._move("read", address + body[0], start + body[0], body[1])
        return perf_counter()

    def _write_piece(self, address: int, start: int, nbytes: int) -> float:
        head, body, tail = self._cut(address, start, nbytes)
        for offset, length in (head, tail):
            if length:
                self._write_through_buffer(address + offset, start + offset, length)
        if body[1]:
            self._move("write", address + body[0], start + body[0], body[1])
        return perf_counter()

    def _write_through_buffer(self, address: int, start: int, length: int) -> None:
        """Write what is not aligned. Blocks that it fills in part keep the rest of what they hold."""
        buffer = self._buffer()
        low, high = start // BLOCK * BLOCK, round_up(start + length)
        first, last = start > low, start + length < high
        # Two neighbours may fill parts of one block.
        with self._edges if first or last else nullcontext():
            if first:
                self._move("read", buffer, low, BLOCK)
            if last and (not first or high - low > BLOCK):
                self._move("read", buffer + high - low - BLOCK, high - BLOCK, BLOCK)
            ctypes.memmove(buffer + start - low, address, length)
            self._move("write", buffer, low, high - low)

    def _cut(self, address: int, start: int, nbytes: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Head, body and tail as (offset, length); the body can be moved straight, the others need a buffer."""
        if not self.is_direct:
            return (0, 0), (0, nbytes), (0, 0)
        if (address - start) % BLOCK:
            return (0, nbytes), (0, 0), (0, 0)
        head = min(nbytes, -start % BLOCK)
        body = (nbytes - head) // BLOCK * BLOCK
        return (0, head), (head, body), (head + body, nbytes - head - body)

    def _buffer(self) -> int:
        """The address of this thread's own buffer."""
        if not hasattr(self._own, "buffer"):
            self._own.memory = mmap.mmap(-1, _PIECE + 2 * BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._own.buffer = ctypes.addressof(ctypes.c_char.from_buffer(self._own.memory))
        address: int = self._own.buffer
        return address

    def _move(self, what: str, address: int, start: int, nbytes: int) -> None:
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        call = os.preadv if what == "read" else os.pwritev
        done = 0
        while done < nbytes:
            try:
                count = call(self._handle, [view[done:]], start + done)
            except OSError as error:
                raise self._error(what, nbytes, start, error) from None
            if not count:
                raise OffloadError(
                    errno.EIO,
                    f"offload wanted to {what} {nbytes:,} bytes at {start:,} of its file in {str(self.directory)!r}, "
                    f"but the file ends {nbytes - done:,} bytes earlier: another program has cut it short",
                )
            done += count

    def _error(self, what: str, nbytes: int, start: int, error: OSError) -> OffloadError:
        advice = "make room there, or give another directory" if error.errno in _FULL else "give another directory"
        return OffloadError(
            error.errno,
            f"offload cannot {what} {nbytes:,} bytes at {start:,} of its file in {str(self.directory)!r}: "
            f"{error.strerror}; {advice}",
        )

    def _probe(self) -> None:
        """Some file systems take the flag and refuse the first request."""
        try:
            self._move("read", self._buffer(), 0, BLOCK)
        except OffloadError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~_DIRECT)
            self.is_direct = False


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _open_unnamed(directory: Path) -> int:
    """A file handle of this process's own; nothing in ``directory`` bears its name."""
    _clear_left(directory)
    if hasattr(os, "O_TMPFILE"):
        try:
            return _open(directory, os.O_TMPFILE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    for _ in range(_ATTEMPTS):
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        try:
            return _open(own / "states", os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Another run took it for one that had been left.
            continue
        finally:
            shutil.rmtree(own, ignore_errors=True)
    raise OSError(errno.EBUSY, "other runs keep deleting files in the directory")


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_RDWR | _DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return os.open(path, flags | os.O_RDWR, 0o600)


def _clear_left(directory: Path) -> None:
    """Remove what this user's killed processes have left: a directory is in use for an instant only."""
    for left in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = left.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                shutil.rmtree(left)
