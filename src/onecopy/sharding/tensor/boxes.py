"""Boxes: a run of elements of a flattened tensor as few n-dimensional boxes. Pure arithmetic.

A slice cuts through parameters anywhere, while checkpoints know rectangular pieces. In row-major order a run is the end
of a row, whole rows, and the beginning of a row, each row in turn being cut the same way:

    shape (4, 6)   . . . x x x      box 1: the end of a row
                   x x x x x x      box 2: whole rows
                   x x x x x x
                   x x . . . .      box 3: the beginning of a row
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements lie in one run of the flattened tensor.

    Attributes:
        offsets: its first element, by dimension.
        sizes: its length in elements, by dimension.
        start: its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def find_boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """The boxes of a run, in its order: at most 2n - 1 for n dimensions, none for an empty run.

    Args:
        shape: of the tensor, which is flattened in row-major order.
        start: first element of the run.
        numel: its length.
    """
    if numel == 0:
        return []
    if not shape:
        return [Box((), (), start)]
    inner = prod(shape[1:])
    stop = start + numel
    first_whole, last_whole = -(-start // inner), stop // inner
    if first_whole > last_whole:
        return _within(start // inner, shape[1:], start, numel)
    boxes = _within(first_whole - 1, shape[1:], start, first_whole * inner - start)
    if first_whole < last_whole:
        offsets = (first_whole, *(0 for _ in shape[1:]))
        boxes.append(Box(offsets, (last_whole - first_whole, *shape[1:]), first_whole * inner))
    return boxes + _within(last_whole, shape[1:], last_whole * inner, stop - last_whole * inner)


def _within(row: int, shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """The boxes of a run inside one row."""
    begin = row * prod(shape)
    return [
        Box((row, *box.offsets), (1, *box.sizes), begin + box.start) for box in find_boxes(shape, start - begin, numel)
    ]
