"""Versions: when slices may be read by other ranks, and when they may change.

Between two writes every rank fetches every slice when and as often as it likes, and nobody waits for anybody's
control flow. A write begins with a barrier: once all ranks have come to it, none reads the old version any more. What
was written is laid out as the next version when the write is over, and whoever wants it waits for no more than that.

    laid out: any rank reads ──▶ barrier ──▶ written to: none reads ──▶ laid out under the next number

The writes of an optimizer's step are one write. All ranks make the same writes, so they agree on the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onecopy.comm.mesh import Axis
from onecopy.sharding.bucket.bucket import Bucket


class Versions:
    """The versions of one model's slices.

    Args:
        axis: the ranks that read each other's slices.
        buckets: all that the model has.
        uses: how often a step gathers each of them.

    Slices on a device are not fetched, whatever the group can do for the CPU's: they are gathered by collectives.
    """

    def __init__(self, axis: Axis, buckets: Sequence[Bucket], uses: int) -> None:
        self._axis = axis
        self._buckets = buckets
        self._number = 1
        self._is_laid_out = False
        self._in_step = False
        # What is cast on the way must be asked for, or cast copies would lie about.
        often = [uses if bucket.dtypes.compute == bucket.lent_dtype else 0 for bucket in buckets]
        may_fetch = any(bucket.device.type in ("cpu", "meta") for bucket in buckets)
        may_fetch = may_fetch and all(bucket.is_fetchable for bucket in buckets)
        shelves = axis.make_shelves([bucket.tag for bucket in buckets], often) if may_fetch else None
        self._has_shelves = shelves is not None
        for position, bucket in enumerate(buckets):
            bucket.before_write = self.before_write
            bucket.shelf = None if shelves is None else shelves[position]

    @property
    def reads_freely(self) -> bool:
        """Whether ranks fetch each other's slices; else they gather some by collectives, each rank the same ones."""
        return len(self._on_shelves) == len(self._buckets)

    @property
    def _on_shelves(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if self._has_shelves and bucket.device.type == "cpu"]

    def lay_out(self, *, before_write: bool = False) -> None:
        """Let other ranks read what the slices hold now. ``before_write``: writes have been announced, to be made."""
        if self._is_laid_out:
            return
        self._is_laid_out = True
        for bucket in self._buckets:
            bucket.masters.catch_up(stays_behind=before_write)
        for bucket in self._on_shelves:
            bucket.lay_out(self._number)

    def before_write(self) -> None:
        """A slice is about to change; every rank comes here. One of a step's writes waits for the readers."""
        if self._in_step and not self._is_laid_out:
            return
        self.lay_out(before_write=True)
        self._end_reading(self._axis.barrier if self._on_shelves else None)

    def open_write(self, agree: Callable[[], None] | None) -> None:
        """A step's writes may begin, with no message of their own: ``agree`` returns once all ranks have come here.

        Where it raises, nothing has happened. None: no rank reads now.
        """
        self.lay_out(before_write=True)
        self._end_reading(agree)

    def retire(self) -> None:
        """No rank reads slices until new `Versions` are made: those who did may be gone."""
        self._has_shelves = False
        for bucket in self._buckets:
            bucket.shelf = None

    def _end_reading(self, agree: Callable[[], None] | None) -> None:
        on_shelves = self._on_shelves
        for bucket in on_shelves:
            # A gather that was begun ahead, of what the forward then did not come to.
            bucket.finish_gather()
        if agree is not None:
            agree()
        for bucket in on_shelves:
            bucket.clear_shelf()
        self._number += 1
        self._is_laid_out = False

    def step_begins(self) -> None:
        """An optimizer's step begins, all of whose writes are one."""
        self.lay_out()
        self._in_step = True

    def step_ends(self) -> None:
        self._in_step = False
        self.lay_out()
