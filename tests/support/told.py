"""Told: how a rank that others wait for in vain knows that they have been told so, and may end."""

from __future__ import annotations

import mmap
import time


class Told:
    """Who has been told. Made before the fork, so that all ranks see the same."""

    def __init__(self, num_ranks: int) -> None:
        self._told = mmap.mmap(-1, num_ranks)

    def tell(self, rank: int) -> None:
        """``rank`` has been told."""
        self._told[rank] = 1

    def wait_for_others(self) -> None:
        """Until all ranks but this one have been told, 20 seconds at most."""
        deadline = time.monotonic() + 20
        while sum(self._told[:]) < len(self._told) - 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
