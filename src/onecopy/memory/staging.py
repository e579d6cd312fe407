"""Staging: communication buffers whose size is bounded by a constant, not by the model (ZeRO §6.2, C_B).

A collective borrows one for what it sends and what it sums. Between the CPU's ranks buffers lie in a region of the
arena of their own, are kept and lent again, so a steady training loop allocates none. On accelerators they go back to
PyTorch's allocator, which keeps memory itself: activations have it while nothing is sent. The bound is an upper one: a
small model gets small buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from onecopy.memory.arena import Arena

CPU_BYTES: Final = 4 * 2**20
"""Most bytes of one buffer on the CPU: in whole steps as fast as larger ones where ranks read each other's memory."""

ACCELERATOR_BYTES: Final = 2 * 2**30
"""Elsewhere: the embedding of an 8B model goes in one piece. There a third piece has the stream that computes wait for
the first: with 256 MiB a fifth of an 8B model's step is lost (docs/accelerators.md)."""


def default_bytes(device: torch.device) -> int:
    """Most bytes of one buffer for tensors of ``device``, where nothing is said."""
    return CPU_BYTES if device.type == "cpu" else ACCELERATOR_BYTES


_ALIGNMENT: Final = 16
"""Bytes. What NCCL's fast path and the widest loads of GPUs ask for."""

_LOANS: Final = 2
"""Buffers made at once: two units' reduces are under way at a time, or may be, and memory is not to depend on that."""


class _Plan:
    """How slices pass through a buffer: worked out once for each size.

    Args:
        rows: slices in a piece.
        numel: elements of a slice.
        dtype: of the elements.
        limit: most bytes of the buffer.
    """

    def __init__(self, rows: int, numel: int, dtype: torch.dtype, limit: int) -> None:
        self.rows = rows
        self.dtype = dtype
        self.banks, self.columns = 1, numel
        if rows * numel * dtype.itemsize > limit:
            # Where a piece and a bank begin, GPUs are to find an aligned address.
            unit = max(1, _ALIGNMENT // dtype.itemsize)
            fitting = limit // (2 * rows * dtype.itemsize) // unit * unit
            self.banks, self.columns = 2, min(numel, max(unit, fitting))
        self.nbytes = self.banks * rows * self.columns * dtype.itemsize
        self.pieces = [(start, min(start + self.columns, numel)) for start in range(0, numel, self.columns)]


class Loan:
    """Memory for pieces, lent until the end of a `with` block.

    Attributes:
        banks: one, where the limit allows for whole slices, else two: one can be filled while the other is read.
        columns: most elements of each slice in a piece.
        pieces: where the pieces of a slice begin and end, in elements.
    """

    def __init__(self, plan: _Plan, buffer: Tensor, give_back: Callable[[Tensor], None]) -> None:
        self.columns = plan.columns
        self.pieces = plan.pieces
        self._rows = plan.rows
        self._buffer = buffer
        self._give_back = give_back
        flat = buffer[: plan.nbytes].view(plan.dtype)
        self.banks = (flat,) if plan.banks == 1 else flat.split(plan.rows * plan.columns)

    def piece(self, number: int) -> Tensor:
        """Memory for piece ``number``, of shape (rows, elements), contiguous; that of the piece a bank earlier."""
        start, stop = self.pieces[number]
        bank = self.banks[number % len(self.banks)]
        if stop - start < self.columns:
            bank = bank[: self._rows * (stop - start)]
        return bank.view(self._rows, stop - start)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back(self._buffer)


class _RaggedPlan:
    """As `_Plan`, for slices of different lengths: a piece holds the same fraction of each.

    Args:
        lengths: elements of each slice.
        more: further rows of a piece, each as long as that of the longest slice.
    """

    def __init__(self, lengths: tuple[int, ...], more: int, dtype: torch.dtype, limit: int) -> None:
        self.dtype = dtype
        rows = [*lengths, *[max(lengths)] * more]
        self.lengths = lengths
        self.banks, self.count, self.widths = 1, 1, rows
        if sum(rows) * dtype.itemsize > limit:
            unit = max(1, _ALIGNMENT // dtype.itemsize)
            fitting = max(limit // (2 * dtype.itemsize) - len(rows) * unit, 1)
            most = -(-max(lengths) // unit)
            self.banks, self.count = 2, min(-(-sum(rows) // fitting), most)
            self.widths = [-(-numel // (self.count * unit)) * unit for numel in rows]
        self.columns = sum(self.widths)
        self.nbytes = self.banks * self.columns * dtype.itemsize


class RaggedLoan:
    """As `Loan`, for slices of different lengths.

    Attributes:
        lengths: elements of each slice.
        pieces: their numbers.
        banks: as of a `Loan`.
    """

    def __init__(self, plan: _RaggedPlan, buffer: Tensor, give_back: Callable[[Tensor], None]) -> None:
        self.lengths = plan.lengths
        self.pieces = range(plan.count)
        self._plan = plan
        self._buffer = buffer
        self._give_back = give_back
        flat = buffer[: plan.nbytes].view(plan.dtype)
        self.banks = (flat,) if plan.banks == 1 else flat.split(plan.columns)

    def span(self, place: int, number: int) -> tuple[int, int]:
        """Where piece ``number`` of the slice at ``place`` begins and ends, in elements of the slice."""
        width, numel = self._plan.widths[place], self.lengths[place]
        return min(number * width, numel), min((number + 1) * width, numel)

    def rows(self, number: int) -> list[Tensor]:
        """Memory for piece ``number``: of each slice, 1-D and as long as its span, then of each further row."""
        rows = list(self.banks[number % len(self.banks)].split(self._plan.widths))
        for place in range(len(self.lengths)):
            start, stop = self.span(place, number)
            rows[place] = rows[place][: stop - start]
        return rows

    def __enter__(self) -> RaggedLoan:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back(self._buffer)


class Staging:
    """Lends buffers of at most ``limit`` bytes each.

    Args:
        limit: most bytes of one buffer, shared by all rows and banks of a loan; None for `default_bytes`.
        on_change: told how many bytes were allocated (positive) or let go.
    """

    def __init__(self, limit: int | None = None, on_change: Callable[[int], None] | None = None) -> None:
        self._limit = limit
        self._on_change = on_change
        self._arena = Arena()
        self._shelves: defaultdict[torch.device, _Shelf] = defaultdict(_Shelf)
        self._plans: dict[tuple[int, int, torch.dtype, torch.device], _Plan] = {}
        self._ragged: dict[tuple[tuple[int, ...], int, torch.dtype, torch.device], _RaggedPlan] = {}

    def borrow(self, rows: int, numel: int, dtype: torch.dtype, device: torch.device, *, keeps: bool = True) -> Loan:
        """A buffer for pieces of ``rows`` slices of ``numel`` elements; at least 16 bytes of each in a piece.

        Args:
            keeps: whether the buffer is to be lent again; else its memory goes at the end of the loan.
        """
        key = rows, numel, dtype, device
        plan = self._plans.get(key)
        if plan is None:
            limit = default_bytes(device) if self._limit is None else self._limit
            plan = self._plans[key] = _Plan(rows, numel, dtype, limit)
        return Loan(plan, *self._take(plan.nbytes, device, keeps))

    def borrow_ragged(
        self, lengths: tuple[int, ...], more: int, dtype: torch.dtype, device: torch.device, *, keeps: bool = True
    ) -> RaggedLoan:
        """A buffer for pieces of slices of ``lengths`` elements, and ``more`` rows as long as the longest one's."""
        key = lengths, more, dtype, device
        plan = self._ragged.get(key)
        if plan is None:
            limit = default_bytes(device) if self._limit is None else self._limit
            plan = self._ragged[key] = _RaggedPlan(lengths, more, dtype, limit)
        return RaggedLoan(plan, *self._take(plan.nbytes, device, keeps))

    def _take(self, nbytes: int, device: torch.device, keeps: bool) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Memory, and what gives it back."""
        if not keeps:
            self._count(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8, device=device), self._let_go
        shelf = self._shelves[device]
        if nbytes > shelf.nbytes:
            # Smaller ones would not be lent again once the largest unit has been seen.
            for _ in range(len(shelf.idle)):
                self._count(-shelf.idle.pop().nbytes)
            shelf.nbytes = nbytes
            shelf.idle = [self._make(nbytes, device) for _ in range(_LOANS)]
        return shelf.idle.pop() if shelf.idle else self._make(shelf.nbytes, device), self._give_back

    def _give_back(self, buffer: Tensor) -> None:
        shelf = self._shelves[buffer.device]
        if buffer.nbytes == shelf.nbytes:
            shelf.idle.append(buffer)
        else:
            self._count(-buffer.nbytes)

    def _let_go(self, buffer: Tensor) -> None:
        self._count(-buffer.nbytes)

    def _make(self, nbytes: int, device: torch.device) -> Tensor:
        self._count(nbytes)
        with torch.inference_mode(False):
            return self._arena.empty("communication", nbytes, torch.uint8, device)

    def _count(self, nbytes: int) -> None:
        if self._on_change is not None:
            self._on_change(nbytes)


@dataclass
class _Shelf:
    """The buffers of one device that are not lent, all of the same size."""

    nbytes: int = 0
    idle: list[Tensor] = field(default_factory=list)
