"""Reducer: sends units' gradients in one order, a few at a time, and installs the results.

While one unit computes, the gradients of the one before are under way and no more, so whole gradients never pile up.
Where it waits depends on the order alone, never on what happens to have come: a rank that waits sends nothing else
meanwhile, so each must know that at this point all the others have gone as far.
Which parameters no rank used is agreed in one small message per backward, because a parameter that one process would
leave without a gradient must have none here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from onecopy.comm.collective import Collective
from onecopy.comm.mesh import Mesh
from onecopy.sharding.gradients import Gradients
from onecopy.sharding.order import agree_order
from onecopy.sharding.unit import Unit


class Reducer:
    """Carries the gradients of one backward.

    Args:
        units: all units, in the order that every rank knows from the model.
        order: those with gradients, in the order in which they are expected to finish; the first backward corrects it.
        mesh: the ranks.
        before_wait: called with a unit before its reduce may be waited for.

    Attributes:
        dynamic: data leads ranks through different units. Then one rank's reduce may need another's gather and the
            other way round, so none is waited for before the backward is over; gradients pile up until then.
    """

    def __init__(
        self, units: Sequence[Unit], order: Sequence[Unit], mesh: Mesh, before_wait: Callable[[Unit], None]
    ) -> None:
        self.dynamic = False
        self._before_wait = before_wait
        self._units = units
        self._order = list(order)
        self._mesh = mesh
        self._all = [gradients for unit in units for gradients in unit.gradients]
        for gradients in self._all:
            gradients.meanwhile = self._progress
        self._sends = False
        self._last = False
        self._next = 0
        self._finished: list[Unit] = []
        self._agreed = False
        self._underway: list[Unit] = []
        self._uses: dict[Gradients, list[bool]] = {}
        self._messages: list[Collective] = []
        self._flags: torch.Tensor | None = None

    def begin(self, *, sends: bool, last: bool) -> None:
        """A backward begins.

        Args:
            sends: whether its gradients leave the rank.
            last: whether the optimizer may step after it.
        """
        self._sends = sends
        self._last = last
        self._next = 0
        self._finished = []
        self._uses = {}

    def finished(self, unit: Unit, visited: Collection[Unit]) -> None:
        """The unit has computed all its gradients: send them as soon as those before it in the order are sent.

        Args:
            visited: the units that forward came through; others will have no gradient on this rank.
        """
        if unit.finished or not unit.gradients:
            return
        unit.finished = True
        self._finished.append(unit)
        if not self._sends:
            for gradients in unit.gradients:
                gradients.keep()
            return
        while self._next < len(self._order):
            head = self._order[self._next]
            if not head.finished and (head in visited or head.unrecorded or head.visits):
                break
            self._send(head)

    def end(self, *, deviated: bool) -> None:
        """The backward is over: send the rest, and set `p.grad` unless the gradients are kept.

        Args:
            deviated: this rank's data has led through other units than the agreed ones.
        """
        if not self._sends:
            for gradients in self._all:
                gradients.keep()
            return
        while self._next < len(self._order):
            self._send(self._order[self._next])
        used = self._agree_on_use(deviated)
        while self._underway:
            self._complete(self._underway.pop(0))
        for gradients in self._all:
            if gradients.reduced:
                gradients.install(used[gradients], last=self._last)
            gradients.reopen()
        if not self._agreed and self._finished:
            self._agreed = True
            self._order = agree_order(self._mesh, self._units, self._finished, self._order).units

    def settle(self) -> None:
        """Finish the messages that nobody had to wait for."""
        for message in self._messages:
            message.finish()
        self._messages = []
        if self._flags is not None:
            self.dynamic = self.dynamic or bool(self._flags[-1])
            self._flags = None

    def drop(self) -> None:
        """Forget a backward that failed."""
        self._underway = []
        for gradients in self._all:
            gradients.drop()

    def _progress(self) -> None:
        """Between two gradients: what peers have sent is taken in, and makes room for the next piece."""
        for unit in self._underway:
            for gradients in unit.gradients:
                gradients.progress()

    def _send(self, unit: Unit) -> None:
        self._next += 1
        self._before_wait(unit)
        for gradients in unit.gradients:
            self._uses[gradients] = gradients.uses()
            gradients.start_reduce()
        # Its messages are posted before the last one's are waited for: a link must not stand idle.
        while not self.dynamic and self._underway:
            self._complete(self._underway.pop(0))
        self._underway.append(unit)

    def _complete(self, unit: Unit) -> None:
        """Wait for a unit's reduce. Where this rank used every parameter, no agreement is needed to set `p.grad`."""
        for gradients in unit.gradients:
            gradients.finish_reduce()
            if all(self._uses[gradients]):
                gradients.install(self._uses[gradients], last=self._last)

    def _agree_on_use(self, deviated: bool) -> dict[Gradients, list[bool]]:
        """For each parameter whether any rank has a gradient for it.

        A rank with gradients for all of them knows the answer: it sends its message and does not wait.
        """
        self.settle()
        own = [use for gradients in self._all for use in self._uses[gradients]]
        if self._mesh.size == 1 or not own:
            return self._uses
        flags = torch.tensor([*own, deviated], dtype=torch.uint8, device=self._all[0].device)
        self._flags = flags
        if all(own):
            sent = [axis.combine(flags, "agree", maximum=True) for axis in self._mesh.axes]
            self._messages = [message for message in sent if message is not None]
            return self._uses
        for axis in self._mesh.axes:
            if underway := axis.combine(flags, "agree", maximum=True):
                underway.finish()
        answers = iter(bool(flag) for flag in flags.tolist())
        return {gradients: [next(answers) for _ in self._uses[gradients]] for gradients in self._all}
