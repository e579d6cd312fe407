"""Outgoing: what a reduce sends, copied out piece by piece, so that no buffer ever holds all of it (ZeRO §6.2, C_B).

A transport asks for pieces as buffers of constant size come free, and says when it has all of them; until then the
source keeps its memory. The cast to what travels happens on the way. Gradients as autograd left them are a source of
their own (`sharding/bucket/arrived.py`); here is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from onecopy.memory.staging import RaggedLoan


class Outgoing(Protocol):
    """Elements to be sent, flat.

    Attributes:
        numel: how many, padding included.
        dtype: in which they travel.
        device: where they are.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device

    def copy_to(self, piece: Tensor, start: int) -> None:
        """Fill the 1-D ``piece`` with the elements from ``start`` on, cast to its dtype. Padding stays undefined."""

    def close(self) -> None:
        """All has been copied out: the memory may go."""


class Flat:
    """One flat tensor.

    Args:
        flat: 1-D.
        dtype: in which it travels.
        on_close: called when it has been copied out.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype, on_close: Callable[[], None] | None = None) -> None:
        self.numel = flat.numel()
        self.dtype = dtype
        self.device = flat.device
        self._flat: Tensor | None = flat
        self._on_close = on_close

    def copy_to(self, piece: Tensor, start: int) -> None:
        assert self._flat is not None
        piece.copy_(self._flat[start : start + piece.numel()])

    def close(self) -> None:
        self._flat = None
        if self._on_close is not None:
            self._on_close()


def copy_slices(outgoing: Outgoing, rows: Tensor, start: int) -> None:
    """Fill row k of ``rows``, contiguous, of shape (N, width), with what slice k of N holds from ``start`` on."""
    slices, width = rows.shape
    numel = outgoing.numel // slices
    if width == numel:
        # The slices lie end to end, in both.
        outgoing.copy_to(rows.view(-1), 0)
        return
    for place, row in enumerate(rows):
        outgoing.copy_to(row, place * numel + start)


def copy_ragged(outgoing: Outgoing, rows: Sequence[Tensor], loan: RaggedLoan, number: int) -> None:
    """As `copy_slices`, of slices of different lengths: into row k what piece ``number`` holds of slice k."""
    begin = 0
    for place, row in enumerate(rows):
        if row.numel():
            outgoing.copy_to(row, begin + loan.span(place, number)[0])
        begin += loan.lengths[place]
