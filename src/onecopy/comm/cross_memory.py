"""Cross-memory attach: ranks on one machine read each other's buffers, instead of pushing them through sockets.

A message to such a peer carries an address, not data. The receiver has the kernel copy the bytes over once, straight
into place (`process_vm_readv`, Linux), and answers when it has them; until then the sender's buffer must stay as it is:

    sender    offer: address, bytes ──▶             ◀── taken
    receiver                          copies the bytes

A socket copies each byte twice and wakes two more threads; NCCL and MPI go the same way inside a machine. Which peers
can be reached so is found out by trying (`find_neighbours`); the others keep their sockets (`transport.py`).
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

from onecopy.comm.collective import Work

SWITCH: Final = "ONECOPY_CROSS_MEMORY"
"""Environment variable: "0" sends everything through sockets, as between machines."""

SMALLEST: Final = 16384
"""Bytes of a tensor from which three small messages and a copy cost less than the tensor in a socket."""

_PROBE: Final = 16


class _Segment(ctypes.Structure):
    """`struct iovec` of <sys/uio.h>."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(frozen=True)
class Neighbours:
    """The peers on one axis whose memory this rank can read, and who can read this rank's.

    Attributes:
        processes: process id at each such place.
        smallest: bytes of a tensor from which it goes this way.
        answers: messages sent that nobody had to wait for.
    """

    processes: dict[int, int] = field(default_factory=dict)
    smallest: int = SMALLEST
    answers: deque[Work] = field(default_factory=deque)

    def reach(self, peer: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` goes to and comes from the place ``peer`` this way."""
        return peer in self.processes and tensor.is_cpu and tensor.nbytes >= self.smallest


class Post(Protocol):
    """Posts a message of a small tensor to or from one peer."""

    def __call__(self, tensor: Tensor, *, answer: bool = False) -> Work: ...


class Offer:
    """A tensor that a peer may take. ``wait`` returns when it has; until then the tensor must not change."""

    def __init__(self, tensor: Tensor, send: Post, receive: Post) -> None:
        self._tensor = tensor
        self._taken = receive(torch.empty(1, dtype=torch.uint8), answer=True)
        self._told = send(torch.tensor([tensor.data_ptr(), tensor.nbytes]))

    def wait(self, timeout: timedelta | None = None) -> None:
        _wait(self._told, timeout)
        _wait(self._taken, timeout)


class Fetch:
    """A tensor that is to be filled from a peer's offer. ``wait`` copies it."""

    def __init__(self, tensor: Tensor, neighbours: Neighbours, peer: int, send: Post, receive: Post) -> None:
        self._tensor = tensor
        self._neighbours = neighbours
        self._process = neighbours.processes[peer]
        self._send = send
        self._offer = torch.empty(2, dtype=torch.int64)
        self._offered = receive(self._offer)

    def wait(self, timeout: timedelta | None = None) -> None:
        _wait(self._offered, timeout)
        address, nbytes = self._offer.tolist()
        if nbytes != self._tensor.nbytes:
            raise RuntimeError(
                f"process {self._process} offers {nbytes} bytes where {self._tensor.nbytes} were expected"
            )
        if not read_memory(self._process, address, self._tensor):
            raise RuntimeError(f"the memory of process {self._process} cannot be read any more")
        answers = self._neighbours.answers
        answers.append(self._send(torch.ones(1, dtype=torch.uint8), answer=True))
        # Long arrived, but a message that nobody waits for is never given back.
        while len(answers) > 2 * len(self._neighbours.processes):
            answers.popleft().wait()


def read_memory(process: int, address: int, into: Tensor) -> bool:
    """Fill the contiguous CPU tensor ``into`` from another process's memory. Returns whether all of it could be read.

    Needs Linux, the same user, and that the machine lets processes trace each other (`ptrace`).
    """
    copy = _process_vm_readv()
    if copy is None:
        return False
    copied = 0
    while copied < into.nbytes:
        here = _Segment(into.data_ptr() + copied, into.nbytes - copied)
        there = _Segment(address + copied, into.nbytes - copied)
        count = copy(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            return False
        copied += count
    return True


def find_neighbours(place: int, exchange: Callable[[object], list[object]], smallest: int = SMALLEST) -> Neighbours:
    """The peers that can be reached through memory. A collective call.

    Args:
        place: this rank's place on the axis.
        exchange: every rank's object, in order of places.
        smallest: bytes of a tensor from which it goes this way.
    """
    # Process ids mean nothing across containers, where another process may have the same one: so a secret is read.
    probe = torch.tensor(list(secrets.token_bytes(_PROBE)), dtype=torch.uint8)
    enabled = os.environ.get(SWITCH, "1") != "0"
    card = (os.getpid(), probe.data_ptr(), bytes(probe.tolist())) if enabled else None
    cards: list[tuple[int, int, bytes] | None] = exchange(card)  # type: ignore[assignment]
    found = {
        peer: offered[0]
        for peer, offered in enumerate(cards)
        if offered is not None and enabled and peer != place and _can_read(*offered)
    }
    others: list[set[int]] = exchange(set(found))  # type: ignore[assignment]
    return Neighbours({peer: process for peer, process in found.items() if place in others[peer]}, smallest)


def _can_read(process: int, address: int, secret: bytes) -> bool:
    probe = torch.zeros(_PROBE, dtype=torch.uint8)
    return read_memory(process, address, probe) and bytes(probe.tolist()) == secret


@cache
def _process_vm_readv() -> Callable[..., int] | None:
    """The C library's function; None where it has none (it is Linux's own)."""
    function = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if function is not None:
        segments = (ctypes.c_void_p, ctypes.c_ulong)
        function.argtypes = (ctypes.c_int, *segments, *segments, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
    return function


def _wait(work: Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
