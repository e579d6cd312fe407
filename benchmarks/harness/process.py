"""What a process holds, and how malloc is told to treat what is freed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_MMAP_MAX: Final = -4
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX of <malloc.h>."""


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, for every system alike, as `onecopy train` does: see docs/performance.md."""
    ctypes.CDLL(None).mallopt(_MMAP_MAX, 0)
    ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Have malloc map every larger block by itself, so that the resident set falls when a tensor is freed.

    What malloc holds free already goes back to the system: a forked rank inherits its launcher's free blocks, malloc
    hands those out before it maps new ones, and a tensor in such a block would not be seen to arrive.
    """
    malloc = ctypes.CDLL(None)
    malloc.mallopt(_MMAP_THRESHOLD, 65536)
    malloc.malloc_trim(0)


def status_bytes(name: str) -> int:
    """Bytes, from a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {name}")


def restart_peak() -> None:
    """The resident set's peak starts anew from what it is now."""
    Path("/proc/self/clear_refs").write_text("5")


def own_peak() -> int:
    """Bytes of the resident set at its peak, without what is mapped from files: code and libraries stay once used."""
    return status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem")
