"""Environment: what the ranks of one host share, set before they start. It imports no torch."""

from __future__ import annotations

import os
import sys


def threads(ranks: int) -> int:
    """Threads for each of the ranks on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def prepare_environment(ranks: int, address: str = "127.0.0.1") -> None:
    """Set what ``ranks`` processes of this host want in their environment, unless somebody has.

    Args:
        address: at which hosts find each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(ranks)))
    # Whole parameters and gradients come and go by the megabyte: malloc must not hand each to the kernel and back.
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
    if sys.platform == "linux" and address in ("127.0.0.1", "localhost"):
        # All ranks are on this host, whose own name may lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
