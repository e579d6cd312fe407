"""The paged step: an optimizer's own `step()` over parameters that rest in files, a bucket at a time.

The optimizer is not replaced. A step pre-hook, which torch offers, hands its `step()` a twin: an object of its class
that shares its states and all else but `param_groups`. Walking those, it comes to one group for each bucket and group
of the user's, and what belongs to the bucket is at hand from before it comes there until after it has gone on:

    a thread    brings      bucket 2     bucket 3 …            reads
    step()      computes    bucket 1     bucket 2 …            of the optimizer's own code
    files       puts away   bucket 0     bucket 1 …            writes

Memory: three of the largest bucket's slices, with gradients and states, whatever the model. Hooks, schedulers and
closures see one step. Values that a step changes in a group must come out alike in all parts of it.

A step over whole parameters sees those that this rank owns as plain ones while they are at hand (`owned.py`), and the
others not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from onecopy.errors import UsageError
from onecopy.memory.arena import Region
from onecopy.memory.store.pages import Page, Pages
from onecopy.memory.store.pool import SLOTS, Cancelled, Pool
from onecopy.sharding.bucket.masters import Stores
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.setup.owned import StandIns, elements_in_memory, is_laid_whole
from onecopy.sharding.setup.reserved import is_torchs_own
from onecopy.sharding.tensor.resting import RestingTensor

Arrival = list[tuple[Page, Tensor, Callable[[], None]]]
"""Pages on their way, the memory for each, and what waits until it is at hand."""

_log = logging.getLogger("onecopy")
_told: Final[set[type]] = set()
"""Optimizers that were said to step slowly."""


@dataclass
class _Stop:
    """A bucket on the way of a step.

    Attributes:
        pages: the bucket's.
        parameters: those that the optimizer holds.
        first, last: the parts of groups that they are in.
    """

    pages: Pages
    parameters: list[RestingTensor]
    first: int
    last: int
    at_hand: list[tuple[Page, Tensor]] = field(default_factory=list)
    stand_ins: StandIns | None = None

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def pages_for(self, optimizer: Optimizer) -> list[Page]:
        """What a step of ``optimizer`` needs."""
        gradient = self.pages.gradient
        shown = any(isinstance(p.grad, RestingTensor) and p.grad.page is gradient for p in self.parameters)
        own = [gradient] if gradient is not None and shown else []
        return [self.pages.master, *own, *self.pages.states_of(optimizer)]


class PagedGroups(list[dict[str, Any]]):
    """The groups of an optimizer, a part for each bucket; to walk them brings and puts away what they need.

    Args:
        sees_whole: steps see parameters whole on one rank. In a part they are there while their bucket is at hand.
    """

    def __init__(self, optimizer: Optimizer, stores: Stores, *, sees_whole: bool = False) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.stores = stores
        self._need = need_of(optimizer) if sees_whole else None
        self._groups: list[dict[str, Any]] = []
        self._members: list[list[Any]] = []
        self._stops: list[_Stop] = []
        for pages, members in _by_pages(optimizer).items():
            first = len(self)
            for number, parameters in members.items():
                group = optimizer.param_groups[number]
                self._groups.append(group)
                self._members.append(parameters)
                self.append({**group, "params": self._without_whole(parameters)})
            if pages is not None:
                every = [parameter for parameters in members.values() for parameter in parameters]
                self._stops.append(_Stop(pages, every, first, len(self) - 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        walk = _Walk([stop for stop in self._stops if stop.has_gradients], self)
        try:
            for position in range(len(self)):
                walk.come_to(position)
                yield self[position]
                walk.go_on(position)
            walk.end()
        finally:
            walk.close()

    def show(self, stop: _Stop) -> None:
        """The parts of ``stop``, which is at hand, have its whole parameters."""
        if self._need is None:
            return
        stop.stand_ins = StandIns(self.optimizer, stop.parameters)
        for position in range(stop.first, stop.last + 1):
            self[position]["params"] = stop.stand_ins.seen(self._members[position])

    def hide(self, stop: _Stop) -> None:
        """They have them no more."""
        if stop.stand_ins is not None:
            stop.stand_ins.end()
            stop.stand_ins = None
            for position in range(stop.first, stop.last + 1):
                self[position]["params"] = self._without_whole(self._members[position])

    def _without_whole(self, parameters: list[Any]) -> list[Any]:
        return [parameter for parameter in parameters if not is_laid_whole(parameter, self._need)]

    def write_back(self) -> None:
        """Give the optimizer's groups the values that the step has left in their parts.

        Raises:
            UsageError: if they differ between parts of one group.
        """
        found: dict[int, dict[str, Any]] = {}
        # By number: to walk them would page.
        for number, group in enumerate(self._groups):
            part = self[number]
            values = {name: value for name, value in part.items() if name != "params"}
            earlier = found.setdefault(id(group), values)
            different = [name for name in values if not _same(values[name], earlier.get(name))]
            if different:
                raise UsageError(
                    f"{type(self.optimizer).__name__} changed {different[0]!r} in a group differently for each "
                    "bucket of parameters, so its step needs all parameters at once, but they are offloaded to "
                    "disk: call onecopy.shard without offload=, or use an optimizer that updates each element by "
                    "itself."
                )
            group.update(values)


def page_step(optimizer: Optimizer, stores: Stores, *, sees_whole: bool) -> Optimizer:
    """What is to be stepped in place of ``optimizer``, whose parameters rest in the files of ``stores``.

    Args:
        sees_whole: as `owned.sees_whole` says. Then each parameter is updated by itself.

    Raises:
        UsageError: if its step needs all parameters at once, or sees whole ones some of which do not rest in files.
    """
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS needs all parameters at once in its step, but they are offloaded to disk: call onecopy.shard "
            "without offload=, or use an optimizer that updates each element by itself (AdamW, SGD)."
        )
    if sees_whole:
        _check_all_rest(optimizer)
    elif not _updates_each_element_alone(optimizer):
        return optimizer
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = PagedGroups(optimizer, stores, sees_whole=sees_whole)
    return twin


def _check_all_rest(optimizer: Optimizer) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if is_laid_whole(parameter, need_of(optimizer)) and not isinstance(parameter, RestingTensor):
            raise UsageError(
                f"{type(optimizer).__name__} holds {parameter.slicing.name!r}, which is in memory, beside whole "
                "parameters that are offloaded to disk: make an optimizer for each of the two models."
            )


def _updates_each_element_alone(optimizer: Optimizer) -> bool:
    """Whether the update of an element depends on no other, nor on a parameter's place among others.

    Those of torch.optim do so, and what says it of itself. Any other step works on parameters where they rest, one
    after the other: as it would without offload, but each operation reads and writes what it needs.
    """
    kind = type(optimizer)
    said = getattr(kind, "updates_each_element_alone", None)
    if said is None:
        said = is_torchs_own(optimizer)
    if not said and kind not in _told:
        _told.add(kind)
        _log.warning(
            "%s steps over parameters on disk one by one, which is slow: its code is not torch.optim's, and may depend "
            "on more than each element. If it does not, set updates_each_element_alone = True on the class.",
            kind.__name__,
        )
    return bool(said)


def end_paged_step(optimizer: Optimizer, twin: object, stores: Stores) -> None:
    """Take over what the step of ``twin`` has changed, if ``twin`` is that of ``optimizer``.

    Where the optimizer has stepped itself, the states that it has made go to where its parameters rest.
    """
    if twin is optimizer:
        for pages, members in _by_pages(optimizer).items():
            if pages is not None:
                _adopt_states(pages, [one for many in members.values() for one in many], optimizer, stores)
        stores.outbox.wait()
        return
    if not isinstance(twin, Optimizer) or not isinstance(twin.param_groups, PagedGroups):
        return
    twin.param_groups.write_back()
    for name, value in vars(twin).items():
        if name != "param_groups" and value is not vars(optimizer).get(name):
            setattr(optimizer, name, value)


class _Walk:
    """One pass of a step over the buckets."""

    def __init__(self, stops: list[_Stop], groups: PagedGroups) -> None:
        self._stops = stops
        self._groups = groups
        self._optimizer = optimizer = groups.optimizer
        self._stores = stores = groups.stores
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._by_first = {stop.first: stop for stop in stops}
        self._by_last = {stop.last: stop for stop in stops}
        self._current: _Stop | None = None
        for walk in stores.walks:
            # A step that failed, whose error somebody keeps.
            walk.close()
        stores.walks[:] = [self]
        needs = [stop.pages_for(optimizer) for stop in stops]
        stores.pool.allow(SLOTS * max((Pool.room_for(pages) for pages in map(_sizes, needs)), default=0))
        self._thread = Thread(target=self._bring_all, args=(needs,), name="onecopy-paging", daemon=True)
        self._thread.start()

    def _bring_all(self, needs: list[list[Page]]) -> None:
        try:
            for pages in needs:
                self._arrivals.put(self._bring(pages))
        except Cancelled:
            pass
        except BaseException as error:
            self._arrivals.put(error)

    def _bring(self, pages: list[Page]) -> Arrival:
        memory: list[Tensor] = []
        brought: Arrival = []
        try:
            memory.extend(self._stores.pool.take(page.nbytes) for page in pages)
            for page, buffer in zip(pages, memory, strict=True):
                brought.append((page, buffer, page.bring(buffer)))
        except BaseException:
            self._give_back(brought)
            for buffer in memory[len(brought) :]:
                self._stores.pool.give(buffer)
            raise
        return brought

    def _give_back(self, arrival: Arrival) -> None:
        """Nobody wants what was brought."""
        for page, memory, wait in arrival:
            with suppress(Exception):
                wait()
            page.put_away(memory, partial(self._stores.pool.give, memory))

    def come_to(self, position: int) -> None:
        """The step is about to look at the part ``position``."""
        stop = self._by_first.get(position)
        if stop is None:
            return
        arrival = self._arrivals.get()
        if isinstance(arrival, BaseException):
            raise arrival
        self._current = stop
        stop.at_hand = [(page, memory) for page, memory, _ in arrival]
        for _, _, wait in arrival:
            wait()
        if any(p.grad is not None and not self._optimizer.state.get(p) for p in stop.parameters):
            stop.pages.nursery = Region(stop.pages.master.nbytes)
        self._groups.show(stop)

    def go_on(self, position: int) -> None:
        """The step has done with the part ``position``."""
        if (stop := self._by_last.get(position)) is not None:
            self._put_away(stop)

    def _put_away(self, stop: _Stop) -> None:
        self._current = None
        stop.pages.nursery = None
        try:
            self._groups.hide(stop)
            _adopt_states(stop.pages, stop.parameters, self._optimizer, self._stores)
            master = stop.pages.master
            if master.is_changed and stop.pages.on_change is not None and master.at_hand is not None:
                stop.pages.on_change(master.at_hand)
        finally:
            # Where the disk has no room for states, too: what is at hand must not stay so.
            at_hand, stop.at_hand = stop.at_hand, []
            for page, memory in at_hand:
                page.put_away(memory, partial(self._stores.pool.give, memory))

    def end(self) -> None:
        """The step has come to its end: all is written.

        Raises:
            OffloadError: if something could not be.
        """
        for stop in self._stops:
            for page in stop.pages_for(self._optimizer):
                page.wait()
        self._stores.outbox.wait()

    def close(self) -> None:
        """Leave nothing in memory, also where the step has failed."""
        if self not in self._stores.walks:
            return
        self._stores.walks.remove(self)
        self._stores.pool.cancel()
        self._thread.join()
        if self._current is not None:
            with suppress(Exception):
                self._put_away(self._current)
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, list):
                self._give_back(arrival)
        for stop in self._stops:
            for page in stop.pages_for(self._optimizer):
                with suppress(Exception):
                    page.wait()


def _adopt_states(pages: Pages, parameters: list[RestingTensor], optimizer: Optimizer, stores: Stores) -> None:
    """Let states rest that the optimizer has just made, or that were loaded into memory."""
    new: dict[Page, list[tuple[RestingTensor, Tensor]]] = {}
    need = need_of(optimizer)
    for parameter in parameters:
        states = optimizer.state.get(parameter)
        for name, value in list(states.items()) if isinstance(states, dict) else ():
            if (own := elements_in_memory(value, parameter, need)) is not None:
                page = pages.state(optimizer, name, value.dtype)
                resting = RestingTensor(page, parameter.start, parameter.slicing)
                optimizer.state[parameter][name] = resting
                new.setdefault(page, []).append((resting, own))
    for page, found in new.items():
        whole = page.at_hand
        if whole is None:
            # Made just now. It is written beside the next bucket's update, in memory of its own.
            whole = Region(page.nbytes).empty(page.numel, page.dtype).zero_()
        for state, own in found:
            whole[state.start : state.start + state.slicing.numel].copy_(own)
        if page.at_hand is None:
            stores.outbox.store(page, whole)
        page.is_changed = page.at_hand is not None


def _by_pages(optimizer: Optimizer) -> dict[Pages | None, dict[int, list[Any]]]:
    """The optimizer's parameters by the pages where they rest, None of a plain one, and by number of group.

    Groups come in their order, and the first part is one of the first group.
    """
    found: dict[Pages | None, dict[int, list[Any]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            found.setdefault(None, {})[number] = []
        for parameter in group["params"]:
            pages = parameter.page.pages if isinstance(parameter, RestingTensor) else None
            found.setdefault(pages, {}).setdefault(number, []).append(parameter)
    return found


def _sizes(pages: list[Page]) -> list[int]:
    return [page.nbytes for page in pages]


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return bool(value is other or value == other)
