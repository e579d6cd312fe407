"""Order: the one order in which all ranks issue their collectives, and the looking ahead that hides them.

Collectives pair up by order. So an order is agreed once (`agree_order`), and a rank whose data skips a unit still takes
part in that unit's collective when it comes past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onecopy.comm.mesh import Mesh
from onecopy.sharding.unit import Unit

_ORDER_TAG = 14


@dataclass(frozen=True)
class AgreedOrder:
    """An order that all ranks know.

    Attributes:
        units: in that order; a unit that is visited twice stands twice.
        optional: those among them that the first rank did not visit in the pass from which the order was taken.
    """

    units: list[Unit]
    optional: frozenset[Unit]


class GatherOrder:
    """Gathers units in one direction, forward or backward.

    Args:
        units: the order to begin with; the first pass corrects it.
        backward: the direction.
        prefetch: how many units to gather ahead of the one that computes.
        release_passed: whether units that were passed by are released at the end of the pass.
        learn: turns the first pass's visits into the agreed order.

    Attributes:
        deviated: this rank's data has led to other units, or in another order, than the agreed one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        backward: bool,
        prefetch: int,
        release_passed: bool,
        learn: Callable[[list[Unit]], AgreedOrder],
    ) -> None:
        self._backward = backward
        self._prefetch = prefetch
        self._release_passed = release_passed
        self._learn: Callable[[list[Unit]], AgreedOrder] | None = learn
        self._seen: list[Unit] = []
        self._passed: list[Unit] = []
        self._position = 0
        self.deviated = False
        self._set_order(AgreedOrder(list(units), frozenset()))

    def begin(self) -> None:
        """A pass begins."""
        self._position = 0
        self._seen = []
        self._passed = []

    def visit(self, unit: Unit) -> None:
        """Make ``unit`` whole, take part in what lies between, and begin to gather what comes next."""
        position = self._find(unit)
        if position is not None:
            self._start_until(position)
            self._position = position + 1
        if (position is None and not unit.is_whole) or unit in self._optional:
            self._note_deviation()
        unit.start_gather(backward=self._backward)
        if position is not None:
            # Before waiting: a link between two gathers must not stand idle.
            for following in self._units[position + 1 : position + 1 + self._prefetch]:
                following.start_gather(backward=self._backward)
        for passed in self._passed:
            passed.finish_gather()
        unit.finish_gather()
        if self._learn is not None:
            self._seen.append(unit)

    def is_ahead(self, unit: Unit) -> bool:
        """Whether the pass is still to come to ``unit``."""
        return self._last.get(unit, -1) >= self._position

    def take_part(self, unit: Unit) -> None:
        """Begin the gathers up to ``unit``'s, if this rank's data has not led to them.

        To be called before waiting for a reduce of ``unit``: other ranks may need those gathers to come that far.
        """
        self._start_until(self._last.get(unit, -1) + 1)

    def start_rest(self) -> None:
        """Begin all gathers that are left of the pass."""
        self._start_until(len(self._units))

    def end(self) -> None:
        """A pass ends: take part in what is left of it."""
        self.start_rest()
        for unit in self._passed:
            unit.finish_gather()
            if self._release_passed and not unit.in_use:
                unit.release()
        self._passed = []
        if self._learn is not None:
            learn, self._learn = self._learn, None
            self._set_order(learn(self._seen))

    def _set_order(self, order: AgreedOrder) -> None:
        self._units = order.units
        self._optional = order.optional
        self._last = {unit: position for position, unit in enumerate(self._units)}

    def _find(self, unit: Unit) -> int | None:
        """The unit's place ahead in the order; None if it is not ahead, or already whole from having been passed by."""
        if self.is_ahead(unit):
            return self._units.index(unit, self._position)
        if unit not in self._last or self._position < len(self._units) or unit.is_whole:
            return None
        # A second pass: several forwards came before this backward.
        self._position = 0
        return self._units.index(unit)

    def _start_until(self, stop: int) -> None:
        """Take part for the sake of others. What is gathered stays: this rank's data may come to it later."""
        for unit in self._units[self._position : stop]:
            if unit not in self._optional:
                self._note_deviation()
            unit.start_gather(backward=self._backward)
            self._passed.append(unit)
        self._position = max(self._position, stop)

    def _note_deviation(self) -> None:
        """Until an order is agreed there is nothing to deviate from."""
        self.deviated = self.deviated or self._learn is None


def agree_order(mesh: Mesh, units: Sequence[Unit], seen: Sequence[Unit], expected: Sequence[Unit]) -> AgreedOrder:
    """The first rank's order, with each of ``expected`` that it lacks put after its predecessor in ``units``.

    Args:
        units: all units, in the order that every rank knows from the model.
        seen: what this rank visited.
        expected: units that some rank may visit, now or later.
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
    optional = [unit for unit in expected if unit not in order]
    for unit in optional:
        before = [other for other in units[: units.index(unit)] if other in order]
        place = order.index(before[-1]) + 1 if before else 0
        order.insert(place, unit)
    return AgreedOrder(order, frozenset(optional))


def any_rank(mesh: Mesh, flag: bool) -> bool:
    """Whether ``flag`` is true on any rank of the mesh."""
    flags = torch.tensor([float(flag)], device=mesh.control_device)
    for axis in mesh.axes:
        if message := axis.combine(flags, "agree", maximum=True):
            message.finish()
    return bool(flags.item())


def _broadcast(mesh: Mesh, values: torch.Tensor) -> None:
    for axis in mesh.axes:
        axis.broadcast(values, "", _ORDER_TAG)
