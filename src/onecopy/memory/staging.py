"""Staging: communication buffers whose size is bounded by a constant, not by the model (ZeRO §6.2, C_B).

A collective borrows one while it sums what peers sent. Buffers are kept and lent again, so a steady training loop
allocates none. The bound is an upper one: a small model gets small buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

DEFAULT_STAGING_BYTES: Final = 4 * 2**20
"""Most bytes of one staging buffer: the smallest that is as fast as larger ones, by `benchmarks/bucket_bytes.py`."""


class Staging:
    """Lends buffers of at most ``limit`` bytes each.

    Args:
        limit: most bytes of one buffer, shared by all rows of a loan.
        on_change: told how many bytes were allocated (positive) or let go.
    """

    def __init__(self, limit: int = DEFAULT_STAGING_BYTES, on_change: Callable[[int], None] | None = None) -> None:
        self._limit = limit
        self._on_change = on_change
        self._idle: list[Tensor] = []

    @contextmanager
    def borrow(self, rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """A buffer of shape (banks, ``rows``, columns).

        One bank of ``numel`` columns where the limit allows; otherwise two banks of as many as it allows (at least
        one), so that one can be filled while the other is read.
        """
        banks, columns = 1, numel
        if rows * numel * dtype.itemsize > self._limit:
            banks, columns = 2, max(1, min(numel, self._limit // (2 * rows * dtype.itemsize)))
        needed = banks * rows * columns * dtype.itemsize
        buffer = self._take(needed, device)
        try:
            yield buffer[:needed].view(dtype).view(banks, rows, columns)
        finally:
            self._idle.append(buffer)

    def _take(self, needed: int, device: torch.device) -> Tensor:
        for position, buffer in enumerate(self._idle):
            if buffer.numel() >= needed and buffer.device == device:
                return self._idle.pop(position)
        # Too small ones would never be lent again once the largest unit has been seen.
        small = [buffer for buffer in self._idle if buffer.device == device]
        self._idle = [buffer for buffer in self._idle if buffer.device != device]
        if self._on_change is not None:
            self._on_change(needed - sum(buffer.nbytes for buffer in small))
        with torch.inference_mode(False):
            return torch.empty(needed, dtype=torch.uint8, device=device)
