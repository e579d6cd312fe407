"""Layout: how the parameters of a bucket lie end to end in one flat buffer cut into N slices. Pure arithmetic.

    parameter   |---- a ----|b|----- c -----|  padding
    flat        |xxxxxxxxxxx|.|x............|xxxxxxxxxxxx|......|
    slice       |     rank 0     |     rank 1     |     rank 2     |

Slices cut through parameters anywhere, so the gathered buffer *is* the parameters and no copy interleaves them.
Every parameter and every slice starts on a multiple of `ALIGNMENT` elements, which keeps kernels on aligned addresses.
Slices are equal, unless parameters are to lie whole in one of them (`owners.py`): then slices have the lengths that
their parameters need, and those of buckets that are cut make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 8
"""Elements. 16 bytes in bf16, what the widest GPU loads ask for."""


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in one slice.

    Attributes:
        slice_start: where it begins in the slice, in elements.
        parameter_start: where it begins in the flattened parameter, in elements.
        numel: its length in elements, 0 when the slice holds nothing of the parameter.
    """

    slice_start: int
    parameter_start: int
    numel: int


@dataclass(frozen=True)
class Overlap:
    """The part of one parameter that lies in two slices, of one layout or of two.

    Attributes:
        index: which parameter.
        first, second: where it begins in what each of them holds of the parameter, in elements.
        numel: its length in elements.
    """

    index: int
    first: int
    second: int
    numel: int


class Cut:
    """Takes a flat tensor apart in one call, which for many parameters costs less than a view for each.

    Args:
        spans: where each part begins and its length, in elements and in order; those of length 0 anywhere.
        numel: of the tensor.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], numel: int) -> None:
        self._lengths: list[int] = []
        self._places: list[int] = []
        position = 0
        for start, length in spans:
            if length and start > position:
                self._lengths.append(start - position)
                position = start
            self._places.append(len(self._lengths))
            self._lengths.append(length)
            position += length
        self._lengths.append(numel - position)

    def __call__(self, flat: Tensor) -> list[Tensor]:
        """The parts, 1-D."""
        stretches = flat.split(self._lengths)
        return [stretches[place] for place in self._places]


@dataclass(frozen=True)
class Layout:
    """Places of parameters in a flat buffer.

    Attributes:
        numels: elements of each parameter, in order.
        num_slices: N, the shard degree.
        multiple: every slice has a multiple of so many elements; `ALIGNMENT` times the copies of each slice lets
            ranks that hold the same slice share the work on it evenly.
        owners: for each parameter the rank whose slice holds all of it, in rising order. None: parameters are cut.
        shares: of parameters that are cut, which part of them each rank takes; their sum is 1. None: equal parts.
    """

    numels: tuple[int, ...]
    num_slices: int
    multiple: int = ALIGNMENT
    owners: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer, in elements."""
        offsets, position = [], 0
        for index, numel in enumerate(self.numels):
            if self.owners is not None:
                position = max(position, self.starts[self.owners[index]])
            offsets.append(position)
            position += _round_up(numel, ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each slice; at least `multiple`, so that no message is empty."""
        if self.owners is not None:
            held = [0] * self.num_slices
            for owner, numel in zip(self.owners, self.numels, strict=True):
                held[owner] += _round_up(numel, ALIGNMENT)
            return tuple(max(_round_up(numel, self.multiple), self.multiple) for numel in held)
        used = sum(_round_up(numel, ALIGNMENT) for numel in self.numels[:-1]) + sum(self.numels[-1:])
        if self.shares is None:
            return (max(_round_up(-(-used // self.num_slices), self.multiple), self.multiple),) * self.num_slices
        taken = [max(int(share * used) // self.multiple, 1) * self.multiple for share in self.shares]
        # What rounding has left goes to the rank that takes most, of which it is the smallest part.
        taken[self.shares.index(max(self.shares))] += max(_round_up(used - sum(taken), self.multiple), 0)
        return tuple(taken)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each slice begins in the flat buffer, in elements."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @cached_property
    def ragged(self) -> tuple[int, ...] | None:
        """`lengths` where they differ, as a transport is to know; None where slices are equal."""
        return self.lengths if len(set(self.lengths)) > 1 else None

    @property
    def slice_numel(self) -> int:
        """Elements of one slice; of the longest where they differ."""
        return max(self.lengths)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the flat buffer, padding included: what travels when the bucket is gathered."""
        return sum(self.lengths)

    @cached_property
    def _cut(self) -> Cut:
        return Cut(list(zip(self.offsets, self.numels, strict=True)), self.padded_numel)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Of a flat buffer, the part of each parameter, 1-D."""
        return self._cut(flat)

    def segment(self, index: int, rank: int) -> Segment:
        """What the slice of ``rank`` holds of parameter ``index``."""
        low = self.starts[rank]
        high = low + self.lengths[rank]
        begin, end = self.offsets[index], self.offsets[index] + self.numels[index]
        start, stop = max(low, begin), min(high, end)
        if start >= stop:
            return Segment(0, 0, 0)
        return Segment(start - low, start - begin, stop - start)

    def own_part(self, flat: Tensor, rank: int) -> Tensor:
        """Of a flat buffer, the slice of ``rank``."""
        return flat[self.starts[rank] : self.starts[rank] + self.lengths[rank]]

    def segments(self, rank: int) -> Sequence[Segment]:
        """What the slice of ``rank`` holds, parameter by parameter."""
        return [self.segment(index, rank) for index in range(len(self.numels))]

    def overlaps(self, rank: int, other: Layout, place: int) -> list[Overlap]:
        """What the slice of ``rank`` has in common with that of ``place`` in another layout of the same parameters."""
        found = []
        for index, (own, theirs) in enumerate(zip(self.segments(rank), other.segments(place), strict=True)):
            start = max(own.parameter_start, theirs.parameter_start)
            stop = min(own.parameter_start + own.numel, theirs.parameter_start + theirs.numel)
            if start < stop:
                found.append(Overlap(index, start - own.parameter_start, start - theirs.parameter_start, stop - start))
        return found


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
