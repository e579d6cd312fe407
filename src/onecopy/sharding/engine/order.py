"""Order: what a rank gathers ahead, and the one order in which all ranks reduce.

Gathers need no order among ranks, as slices are fetched on demand (`comm/shelf.py`); what follows next is a guess, from
the last pass. Reduces do: a rank's contribution to one is waited for by all others. So the order in which the first
rank's first backward finished its units is everybody's from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from onecopy.comm.mesh import Mesh
from onecopy.sharding.engine.unit import Unit

_ORDER_TAG = 14


PREFETCH_BYTES: Final = 512 * 2**20
"""Bytes gathered ahead on an accelerator where nothing is said: four blocks of a 1B model, one of an 8B model."""


class Foresight:
    """Foretells which units come next, in one direction, from those that came in the last pass.

    Args:
        depth: how many units to foretell; 0: none.
        nbytes: foretell further ones while all of them hold no more than so many bytes.

    Attributes:
        seen: the units of this pass, in order.
    """

    def __init__(self, depth: int, nbytes: int = 0) -> None:
        self.seen: list[Unit] = []
        self._depth = depth
        self._nbytes = nbytes
        self._last: list[Unit] = []
        self._place = 0
        self._told = 0

    def begin(self) -> None:
        """A pass begins."""
        if self.seen:
            self._last = self.seen
        self.seen = []
        self._place = self._told = 0

    def opening(self) -> list[Unit]:
        """With what the next pass is likely to begin: the first unit, and what is gathered ahead there."""
        order = self.seen or self._last
        return order[: 1 + self._window(order, 1)]

    def next_after(self, unit: Unit) -> list[Unit]:
        """The pass has come to ``unit``. Returns what is to be gathered ahead."""
        if self.seen and self.seen[-1] is unit:
            return []
        self.seen.append(unit)
        try:
            self._place = self._last.index(unit, self._place) + 1
        except ValueError:
            return []
        begin = max(self._place, self._told)
        self._told = max(begin, self._place + self._window(self._last, self._place))
        return self._last[begin : self._told]

    def _window(self, order: Sequence[Unit], place: int) -> int:
        """How many units from ``place`` on are foretold."""
        count = total = 0
        while self._depth and place + count < len(order):
            total += order[place + count].whole_bytes
            if count >= self._depth and total > self._nbytes:
                break
            count += 1
        return count


def agree_order(mesh: Mesh, units: Sequence[Unit], seen: Sequence[Unit], expected: Sequence[Unit]) -> list[Unit]:
    """The first rank's order, with each of ``expected`` that it lacks put after its predecessor in ``units``.

    Args:
        units: all units, in the order that every rank knows from the model.
        seen: those of this rank, in its order.
        expected: those that some rank may have, now or later.
    """
    number = {unit: index for index, unit in enumerate(units)}
    own = [number[unit] for unit in seen] + [-1] * (len(units) - len(seen))
    numbers = torch.tensor(own, dtype=torch.int64, device=mesh.control_device)
    for axis in mesh.axes:
        axis.broadcast(numbers, "", _ORDER_TAG)
    order = [units[index] for index in numbers.tolist() if index >= 0]
    for unit in expected:
        if unit not in order:
            before = [other for other in units[: units.index(unit)] if other in order]
            order.insert(order.index(before[-1]) + 1 if before else 0, unit)
    return order
