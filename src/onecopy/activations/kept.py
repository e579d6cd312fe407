"""Kept: what stores of activations have in common, and the store that leaves them on the device.

What is kept is fetched in the reverse order of keeping: who fetches what one call has kept begins to fetch what the
call before it kept. A call is what lies between two `end_call`s: one pass through a checkpointed unit.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Final, Protocol

from torch import Tensor

from onecopy.errors import UsageError
from onecopy.observe.meter import Meter

CATEGORY: Final = "checkpoints"
"""Of the meter."""


class Kept(Protocol):
    """A flat tensor in a store. Its bytes are counted as long as it lives."""

    def fetch(self) -> Tensor:
        """The tensor, on its device. May be called more than once."""


class Store(Protocol):
    def keep(self, flat: Tensor) -> Kept:
        """Take the 1-D ``flat``, to which nobody else may write before `end_call`."""

    def end_call(self) -> None:
        """The call whose tensors were kept is over: kernels launched from now on find them taken."""


class OnDevice:
    """Keeps tensors where they are.

    Raises:
        UsageError: from `Kept.fetch`, if the tensor was modified in place meanwhile. Autograd looks for that in tensors
            that it saves itself, and not in what hooks save for it.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def keep(self, flat: Tensor) -> Kept:
        return _OnDevice(flat, self._meter)

    def end_call(self) -> None:
        """Nothing was moved."""


class _OnDevice:
    def __init__(self, flat: Tensor, meter: Meter) -> None:
        self._unchanged = Unchanged(flat)
        meter.add(CATEGORY, flat.nbytes)
        weakref.finalize(self, meter.add, CATEGORY, -flat.nbytes)

    def fetch(self) -> Tensor:
        return self._unchanged.get()


class Unchanged:
    """A tensor that nobody may modify in place before it is used again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def get(self) -> Tensor:
        """The tensor; an error if it has changed."""
        if self._tensor._version != self._version:
            raise UsageError(
                f"an input of {self._tensor.numel()} elements of a module or function with activation checkpoints "
                f"was modified in place between its forward and its backward, which computes it again: write "
                f"x = x + y in place of x += y there."
            )
        return self._tensor


class Calls:
    """What was kept elsewhere, call by call.

    Attributes:
        now: what the call that runs has kept.
        before: what the call before it kept.
    """

    def __init__(self) -> None:
        self.now: list[weakref.ref[KeptElsewhere]] = []
        self.before: list[weakref.ref[KeptElsewhere]] = []

    def end(self) -> None:
        """The call is over."""
        if self.now:
            self.before, self.now = self.now, []


class KeptElsewhere(ABC):
    """A tensor whose fetch takes time, and is begun when what the next call has kept is fetched."""

    def __init__(self, calls: Calls) -> None:
        self._before = calls.before
        self._was_fetched = False
        calls.now.append(weakref.ref(self))

    def fetch(self) -> Tensor:
        """The tensor, on its device. May be called more than once."""
        self.start()
        self._was_fetched = True
        arrived = self.finish()
        for reference in self._before:
            # Of a graph that is kept, what has been fetched once is not fetched ahead again.
            if (before := reference()) is not None and not before._was_fetched:
                before.start()
        return arrived

    @abstractmethod
    def start(self) -> None:
        """Begin to fetch it, unless that was begun."""

    @abstractmethod
    def finish(self) -> Tensor:
        """The tensor, on its device."""
