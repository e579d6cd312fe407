"""MicroBatches: where in a step training is, which decides whether gradients leave and whole parameters may go.

The engine tells it of forwards, backwards and optimizer steps; it learns what nobody says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MicroBatches:
    """Counts the micro-batches of a step.

    Args:
        accumulate: how many a step has.
    """

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._no_sync = 0
        self._ended = 0
        self._last_ones = 0
        self._expects_step = True

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch is the last one of a step."""
        return self._no_sync == 0 and (self._ended + 1) % self._accumulate == 0

    @property
    def step_follows(self) -> bool:
        """Whether the optimizer is about to change the parameters once this micro-batch's backward is over."""
        return self.is_last and self._expects_step

    def expect(self, accumulate: int) -> None:
        """A step has so many from now on; between two steps."""
        self._accumulate = accumulate
        self._ended = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside are not the last one of a step: stages 0 and 1 send no gradients.

        Stages 2 and 3 still do, for they keep no whole gradients; the result is the same.
        """
        self._no_sync += 1
        try:
            yield
        finally:
            self._no_sync -= 1

    def forward_begins(self) -> None:
        """A forward for training begins; after a last micro-batch one that nobody told of: parameters are of use."""
        if self._last_ones:
            self._expects_step = False

    def backward_ended(self) -> None:
        self._last_ones += self.is_last
        self._ended += 1

    def begin_anew(self) -> None:
        """The next micro-batch is a step's first."""
        self._ended = 0

    def forget(self) -> None:
        """As if nothing had been trained yet."""
        self._ended = self._last_ones = 0
        self._expects_step = True

    def stepped(self) -> None:
        """An optimizer has stepped. If that was another one than the last time, it says nothing of micro-batches."""
        self.begin_anew()
        if self._last_ones:
            self._expects_step = self._last_ones == 1
        self._last_ones = 0
