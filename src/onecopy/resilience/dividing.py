"""Dividing: a global batch over the ranks that there are, so that it stays the same when they become fewer or more."""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.errors import SettingsError


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at a time.

    Attributes:
        samples: which ones of the global batch.
        weight: what their mean loss is to be multiplied by, for gradients to be those of the mean over the global
            batch: samples * ranks / global batch. 0: others have one more sample, and this one is there to keep pace.
    """

    samples: slice
    weight: float


def divide(global_batch: int, most: int, rank: int, ranks: int) -> list[MicroBatch]:
    """A rank's micro-batches: equally many on each rank, of at most so many samples each, and of one at least.

    Raises:
        SettingsError: if one of the numbers is below 1.
    """
    if global_batch < 1 or most < 1:
        raise SettingsError(f"micro_batches wants numbers of samples of 1 and more; found {global_batch} and {most}")
    share, more = divmod(global_batch, ranks)
    start = rank * share + min(rank, more)
    own = share + (rank < more)
    count = -(-(share + (more > 0)) // most)
    each, longer = divmod(own, count)
    found = []
    for number in range(count):
        samples = each + (number < longer)
        if samples:
            found.append(MicroBatch(slice(start, start + samples), samples * ranks / global_batch))
        else:
            found.append(MicroBatch(slice(0, 1), 0.0))
        start += samples
    return found
