"""Order: the one order in which all ranks issue their collectives, and the looking ahead that hides them.

Collectives pair up by order. So an order is agreed once (`agree_order`), and a rank whose data skips a unit still takes
part in that unit's collective when it comes past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onecopy.comm.mesh import Mesh
from onecopy.sharding.unit import Unit

_ORDER_TAG = 14


class GatherOrder:
    """Gathers units in one direction, forward or backward.

    Args:
        units: the order to begin with; the first pass corrects it.
        backward: the direction.
        prefetch: how many units to gather ahead of the one that computes.
        release_passed: whether units that were passed by are released again.
        learn: turns the first pass's visits into the agreed order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        backward: bool,
        prefetch: int,
        release_passed: bool,
        learn: Callable[[list[Unit]], list[Unit]],
    ) -> None:
        self.units = list(units)
        self._backward = backward
        self._prefetch = prefetch
        self._release_passed = release_passed
        self._learn: Callable[[list[Unit]], list[Unit]] | None = learn
        self._seen: list[Unit] = []
        self._position = 0

    def begin(self) -> None:
        """A pass begins."""
        self._position = 0
        self._seen = []

    def visit(self, unit: Unit) -> None:
        """Make ``unit`` whole, take part in what lies between, and begin to gather what comes next."""
        position = self._find(unit)
        if position is not None:
            self._pass_by(position)
            self._position = position + 1
        unit.start_gather(backward=self._backward)
        unit.finish_gather()
        if position is not None:
            for following in self.units[position + 1 : position + 1 + self._prefetch]:
                following.start_gather(backward=self._backward)
        if self._learn is not None:
            self._seen.append(unit)

    def end(self) -> None:
        """A pass ends: take part in what is left of it."""
        self._pass_by(len(self.units))
        self._position = len(self.units)
        if self._learn is not None:
            learn, self._learn = self._learn, None
            self.units = learn(self._seen)

    def _find(self, unit: Unit) -> int | None:
        if self._position == len(self.units):
            self._position = 0
        try:
            return self.units.index(unit, self._position)
        except ValueError:
            return None

    def _pass_by(self, stop: int) -> None:
        for unit in self.units[self._position : stop]:
            unit.start_gather(backward=self._backward)
            unit.finish_gather()
            if self._release_passed and not unit.passages and not unit.holds:
                unit.release()


def agree_order(mesh: Mesh, units: Sequence[Unit], seen: Sequence[Unit], expected: Sequence[Unit]) -> list[Unit]:
    """The first rank's order, with each of ``expected`` that it lacks put after its predecessor in ``units``.

    Args:
        units: all units, in the order that every rank knows from the model.
        seen: what this rank visited.
        expected: units that some rank may visit.
    """
    if mesh.size > 1:
        number = {unit: index for index, unit in enumerate(units)}
        length = torch.tensor([len(seen)], device=mesh.control_device)
        _broadcast(mesh, length)
        numbers = torch.zeros(int(length), dtype=torch.int64, device=mesh.control_device)
        own = [number[unit] for unit in seen][: len(numbers)]
        numbers[: len(own)] = torch.tensor(own, dtype=torch.int64, device=numbers.device)
        _broadcast(mesh, numbers)
        seen = [units[index] for index in numbers.tolist()]
    order = list(seen)
    for unit in expected:
        if unit not in order:
            before = [other for other in units[: units.index(unit)] if other in order]
            place = order.index(before[-1]) + 1 if before else 0
            order.insert(place, unit)
    return order


def _broadcast(mesh: Mesh, values: torch.Tensor) -> None:
    for axis in mesh.axes:
        axis.broadcast(values, "", _ORDER_TAG)
