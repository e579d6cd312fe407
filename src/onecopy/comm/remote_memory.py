"""Reading another process's memory: one call of the Linux kernel, `process_vm_readv`.

It needs the same user and a machine that lets processes trace each other (`ptrace`); elsewhere nothing can be read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


class _Segment(ctypes.Structure):
    """`struct iovec` of <sys/uio.h>."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Window:
    """What lies at ``address`` in process ``process``, ``nbytes`` long, and the memory here that `read` copies it to.

    The bytes at ``into`` must stay allocated as long as the window is used.
    """

    __slots__ = ("_arguments", "_copy", "_here", "_there", "nbytes")

    def __init__(self, process: int, address: int, into: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._copy = _process_vm_readv()
        self._here, self._there = _Segment(into, nbytes), _Segment(address, nbytes)
        self._arguments = (process, ctypes.addressof(self._here), 1, ctypes.addressof(self._there), 1, 0)

    def read(self) -> bool:
        """Copy the bytes. Returns whether all of them could be read."""
        if self._copy is None:
            return False
        # The kernel copies at most 2 GiB in a call.
        left = self.nbytes
        while left and (count := self._copy(*self._arguments)) > 0:
            left -= count
            if left:
                for segment in (self._here, self._there):
                    segment.address += count
                    segment.nbytes = left
        return left == 0


@cache
def _process_vm_readv() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if function is not None:
        segments = (ctypes.c_void_p, ctypes.c_ulong)
        function.argtypes = (ctypes.c_int, *segments, *segments, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
    return function
