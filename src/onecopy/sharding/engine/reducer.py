"""Reducer: sends units' gradients in one order beside computing, and installs the results.

Every rank sends the same units in the same order (`order.py`), those that its data did not lead to as zeros, and waits
for them in that order. So a wait ends as soon as the other ranks have come to the same unit, whatever else they do.
Where the calling thread sends, one unit is under way at a time. A backend with streams of its own has as many as two of
the largest unit, and the first is waited for when the next needs its room: the link has work while computing goes on.
Which parameters no rank used is agreed in one small message per backward, the last one in the order, because a
parameter that one process would leave without a gradient must have none here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence

import torch

from onecopy.comm.mesh import Mesh
from onecopy.errors import CollectiveError
from onecopy.sharding.bucket.gradients import Gradients
from onecopy.sharding.engine.order import agree_order
from onecopy.sharding.engine.unit import Unit


class Reducer:
    """Carries the gradients of one backward.

    Args:
        units: all units, in the order that every rank knows from the model.
        order: those with gradients, in the order in which they are expected to finish; the first backward corrects it.
        mesh: the ranks.
        route: where all ranks must gather alike, tells the units that this rank has gathered in this backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        order: Sequence[Unit],
        mesh: Mesh,
        route: Callable[[], Sequence[Unit]] | None = None,
    ) -> None:
        self._units = units
        self._order = list(order)
        self._mesh = mesh
        self._route = route
        self._all = [gradients for unit in units for gradients in unit.gradients]
        for gradients in self._all:
            gradients.meanwhile = self._progress
        self._sends = False
        self._holds = False
        self._last = False
        self._failed = False
        self._next = 0
        self._finished: list[Unit] = []
        self._agreed = False
        self._underway: list[Unit] = []
        self._elements = {unit: sum(gradients.numel for gradients in unit.gradients) for unit in order}
        queues = any(axis.queues_on(gradients.device) for gradients in self._all[:1] for axis in mesh.axes)
        self._most_underway = 2 * max(self._elements.values(), default=0) if queues else None
        self._uses: dict[Gradients, list[bool]] = {}

    def begin(self, *, sends: bool, last: bool, holds: bool = False) -> None:
        """A backward begins.

        Args:
            sends: whether its gradients leave the rank.
            last: whether the optimizer may step after it.
            holds: whether nothing leaves before its end, since forwards are still to come that nobody knows of.
        """
        self._holds = holds
        self._sends = sends
        self._last = last
        self._failed = False
        self._next = 0
        self._finished = []
        self._uses = {}
        for gradients in self._all:
            gradients.prepare()

    def finished(self, unit: Unit, visited: Collection[Unit]) -> None:
        """The unit has computed all its gradients: send them as soon as those before it in the order are sent.

        Args:
            visited: the units that forward came through; others will have no gradient on this rank.
        """
        if unit.finished or not unit.gradients:
            return
        unit.finished = True
        self._finished.append(unit)
        if self._holds:
            return
        if not self._sends:
            for gradients in unit.gradients:
                gradients.keep()
            return
        while self._next < len(self._order):
            head = self._order[self._next]
            if not head.finished and (head in visited or head.may_come or unit.runs_again):
                break
            self._send(head)

    def end(self) -> None:
        """The backward is over: send the rest, and set `p.grad` unless the gradients are kept.

        Raises:
            CollectiveError: if another rank's backward failed, or ranks did not gather alike.
        """
        if not self._sends:
            for gradients in self._all:
                gradients.keep()
            return
        used = self._finish()
        for gradients in self._all:
            if gradients.reduced:
                gradients.install(used[gradients], last=self._last)
            gradients.reopen()
        if not self._agreed:
            self._agreed = True
            self._order = agree_order(self._mesh, self._units, self._finished, self._order)

    def abandon(self) -> None:
        """This rank's backward failed: send what is left for the others to come to its end too, and forget all."""
        self._failed = True
        if self._sends:
            self._finish()
        self._drop_all()

    def forget(self) -> None:
        """Give up what is under way, without a message."""
        self._sends = self._failed = False
        self._drop_all()

    def _progress(self) -> None:
        """Between two gradients: what peers have sent is taken in, and makes room for the next piece."""
        for unit in self._underway:
            for gradients in unit.gradients:
                gradients.progress()

    def _send(self, unit: Unit) -> None:
        self._next += 1
        if self._most_underway is not None:
            while self._underway and self._elements_underway + self._elements[unit] > self._most_underway:
                self._complete(self._underway.pop(0))
        for gradients in unit.gradients:
            self._uses[gradients] = gradients.uses()
            gradients.start_reduce()
        # Its messages are posted before the last one's are waited for: a link must not stand idle.
        while self._underway and self._most_underway is None:
            self._complete(self._underway.pop(0))
        self._underway.append(unit)

    @property
    def _elements_underway(self) -> int:
        return sum(self._elements[unit] for unit in self._underway)

    def _complete(self, unit: Unit) -> None:
        """Wait for a unit's reduce. Where this rank used every parameter, no agreement is needed to set `p.grad`."""
        for gradients in unit.gradients:
            gradients.finish_reduce()
            if all(self._uses[gradients]) and not self._failed:
                gradients.install(self._uses[gradients], last=self._last)

    def _finish(self) -> dict[Gradients, list[bool]]:
        """Send and complete what is left, in the order; then agree on use. If that fails, nothing is left."""
        try:
            while self._next < len(self._order):
                self._send(self._order[self._next])
            while self._underway:
                self._complete(self._underway.pop(0))
            return self._agree_on_use()
        except CollectiveError:
            self._drop_all()
            raise

    def _agree_on_use(self) -> dict[Gradients, list[bool]]:
        """For each parameter whether any rank has a gradient for it."""
        own = [use for gradients in self._all for use in self._uses[gradients]]
        if self._mesh.size == 1 or not own:
            return self._uses
        extremes = self._digest_route()
        flags = torch.tensor([*own, self._failed, *extremes], dtype=torch.uint8, device=self._mesh.control_device)
        for axis in self._mesh.axes:
            if underway := axis.combine(flags, "agree", maximum=True):
                underway.finish()
        answers = flags.tolist()
        if answers[len(own)] and not self._failed:
            raise CollectiveError(
                "backward raised an error on another rank, whose output names it. The gradients of this micro-batch "
                "are not complete: call optimizer.zero_grad() before training continues."
            )
        if extremes and not self._failed and [255 - byte for byte in answers[-4:]] != answers[-8:-4]:
            raise CollectiveError(
                "ranks came through different units, or in another order, which the collectives of this backend do "
                "not allow at this stage: let the data lead all ranks through the same units, make one unit of the "
                "modules that differ with units=, or use stage 0."
            )
        uses = iter(bool(flag) for flag in answers)
        return {gradients: [next(uses) for _ in self._uses[gradients]] for gradients in self._all}

    def _digest_route(self) -> list[int]:
        """Four bytes and their complements: ranks have the same where the maxima of both tell of one number."""
        if self._route is None:
            return []
        route = repr([self._units.index(unit) for unit in self._route()])
        digest = list(zlib.crc32(route.encode()).to_bytes(4, "big"))
        return digest + [255 - byte for byte in digest]

    def _drop_all(self) -> None:
        self._underway.clear()
        for gradients in self._all:
            gradients.drop()
