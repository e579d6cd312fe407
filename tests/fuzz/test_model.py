"""The schedule ends, on every interleaving of small plans and on some of larger ones; and a broken one is found out.

Virtual ranks run onecopy's own code (`virtual.py`, `schedules.py`). The oracles: somebody can always go on; memory is
never read while it may change; weights are those of one process that averages over ranks; a fault is named. Many more:
`python tests/fuzz/schedules.py --schedules 100000`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.comm.serving import Server
from onecopy.errors import CollectiveError
from onecopy.sharding.bucket.bucket import Bucket, State
from onecopy.sharding.bucket.gradients import Gradients
from onecopy.sharding.engine import engine
from onecopy.sharding.engine.reducer import Reducer
from onecopy.sharding.engine.unit import Unit
from onecopy.sharding.engine.versions import Versions
from ranks import run_ranks
from schedules import AT_NEED, EVERYWHERE, MEMORY, SOCKETS, Plan, Visit, explore, run_at_random
from virtual import Ranks, virtually
from virtual_world import Deadlock, Race

ALL = Visit((0,))


def _one_skips(stage: int, machines: tuple[int, ...]) -> Plan:
    """In the first step rank 0 uses the head alone, and rank 1 the block too."""
    return Plan(stage, machines, ((Visit(()), ALL),), blocks=1, is_bare=True)


def _deviates(stage: int, machines: tuple[int, ...]) -> Plan:
    """After a step on which all agree, rank 0 uses the last block alone, and rank 1 the second."""
    everything = Visit((0, 1, 2), uses_head=False)
    apart = (Visit((2,), uses_head=False), Visit((1,), uses_head=False))
    return Plan(stage, machines, ((everything, everything), apart), blocks=3, is_bare=True, quiet=1)


def _crosses(stage: int, machines: tuple[int, ...]) -> Plan:
    """Ranks come through the same blocks the other way round."""
    return Plan(stage, machines, ((Visit((0, 1)), Visit((1, 0))),), is_bare=True)


def _looks_back(stage: int, machines: tuple[int, ...]) -> Plan:
    """Before a step, rank 0 evaluates on a shorter way than it has foretold."""
    visits = ((Visit((0, 1)), Visit((0, 1))), (Visit((0, 1), looks_back=((0,),)), Visit((0, 1))))
    return Plan(stage, machines, visits, is_bare=True, quiet=1)


def _explore(*calls: tuple[Plan, Sequence[str], Sequence[str]]) -> list[int]:
    """How many states each plan comes through, with those faults, where ranks give way at those points."""

    def states(_: int) -> list[int]:
        return [explore(plan, faults=faults, stops=stops)[0] for plan, faults, stops in calls]

    return run_ranks(1, states, group=False)[0]  # type: ignore[no-any-return]


def test_every_order_of_a_step_in_which_one_rank_skips_a_block_ends_with_the_weights_of_one_process() -> None:
    found = _explore(
        *((_one_skips(stage, MEMORY), (), EVERYWHERE) for stage in (0, 3)),
        *((_one_skips(stage, MEMORY), (), AT_NEED) for stage in (1, 2)),
        (_one_skips(0, SOCKETS), (), EVERYWHERE),
        *((_one_skips(stage, SOCKETS), (), AT_NEED) for stage in (1, 2, 3)),
    )
    assert min(found) > 10, f"too few orders were tried: {found}"


def test_every_order_of_a_pass_that_leaves_the_agreed_one_ends_with_the_weights_of_one_process() -> None:
    found = _explore(
        *((_deviates(stage, MEMORY), (), EVERYWHERE) for stage in (0, 3)),
        *((plan(stage, SOCKETS), (), AT_NEED) for plan, stage in ((_deviates, 3), (_looks_back, 1))),
    )
    # What was offered over sockets moves without a thread of the owner's, which leaves few orders.
    assert min(found) > 5, f"too few orders were tried: {found}"


def test_after_a_death_or_a_time_out_at_any_wait_every_rank_ends_with_a_named_error_or_right_weights() -> None:
    """Who is told of a lost rank runs its micro-batch again, and is told again; who lost patience may come through."""
    death, time_out = ("death",), ("time-out",)
    found = _explore(
        (_one_skips(3, MEMORY), death, AT_NEED),
        (_one_skips(3, SOCKETS), death, AT_NEED),
        (_one_skips(3, MEMORY), time_out, ("write",)),
        (_one_skips(0, SOCKETS), death + time_out, AT_NEED),
    )
    assert min(found) > 5, f"too few faults were tried: {found}"


def test_random_schedules_of_2_to_4_ranks_end_with_the_weights_of_one_process_or_a_named_error() -> None:
    def run(_: int) -> list[str]:
        with virtually():
            return [run_at_random(number) for number in range(40)]

    faults = run_ranks(1, run, group=False)[0]
    assert set(faults) == {"", "death", "time-out"}


def test_a_server_goes_on_handing_out_slices_when_a_rank_that_asked_is_gone() -> None:
    """Else the ranks that are left wait for each other, and not for the one that is gone."""

    class First:
        def choose(self, runs: int, faults: int, state: object) -> int:
            return 0

        def may_stop(self, at: str) -> bool:
            return False

    def run(_: int) -> Tensor:
        world = Ranks((0, 1, 2), First())

        def live(rank: int) -> Tensor:
            server = Server(world.gloo.group(range(3)), rank, (0, 1, 2), {0, 1, 2} - {rank})
            tensor = torch.full((2,), float(rank))
            if rank == 1:
                server.ask(0, 5, tensor, 1)
                raise CollectiveError("it ends")
            world.wait(lambda: 1 in world.dead, "rank 1 to end")
            if rank == 0:
                server.lay(5, tensor, 1)
            else:
                server.ask(0, 5, tensor, 1).wait()
            return tensor

        with virtually():
            return world.run(live)[2].result

    assert torch.equal(run_ranks(1, run, group=False)[0], torch.zeros(2))


# --- broken on purpose


class _AgreesEarly(Reducer):
    """A rank that has not used everything asks who used what before its own reduces are complete."""

    def _finish(self) -> dict[Gradients, list[bool]]:
        while self._next < len(self._order):
            self._send(self._order[self._next])
        if all(all(uses) for uses in self._uses.values()):
            return super()._finish()
        used = self._agree_on_use()
        while self._underway:
            self._complete(self._underway.pop(0))
        return used


class _OwnOrder(Reducer):
    """Each rank sends units as they finish, whatever the others do."""

    def finished(self, unit: Unit, visited: Any) -> None:
        if self._sends and not unit.finished:
            self._order.remove(unit)
            self._order.insert(self._next, unit)
        super().finished(unit, visited)


class _GathersStayUnderWay(Versions):
    """Slices change while a gather of another bucket has yet to read them."""

    def before_write(self) -> None:
        if self._in_step and not self._is_laid_out:
            return
        self.lay_out()
        self._axis.barrier()
        for bucket in self._buckets:
            bucket.clear_shelf()
        self._number += 1
        self._is_laid_out = False


def _gather_at_once(bucket: Bucket) -> None:
    if bucket._gathering is not None:
        bucket._gathering = None
        bucket.state = State.WHOLE


def _with_reducer(kind: type[Reducer]) -> AbstractContextManager[Any]:
    return mock.patch.object(engine, "Reducer", kind)


BROKEN: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Plan, Sequence[str], type[AssertionError], str]] = {
    "agreement before reduces": (
        lambda: _with_reducer(_AgreesEarly),
        _one_skips(0, MEMORY),
        (),
        Deadlock,
        "agree in backward",
    ),
    "gathers in which owners take part, memory": (
        lambda: mock.patch.object(Axis, "make_shelves", return_value=None),
        _deviates(3, MEMORY),
        (),
        Deadlock,
        "all_gather of unit 'blocks.1'",
    ),
    "gathers in which owners take part, sockets": (
        lambda: mock.patch.object(Axis, "make_shelves", return_value=None),
        _deviates(3, SOCKETS),
        (),
        Deadlock,
        "all_gather of unit 'blocks.1'",
    ),
    "each rank reduces in its own order": (
        lambda: _with_reducer(_OwnOrder),
        _crosses(1, MEMORY),
        (),
        Deadlock,
        "reduce_scatter of unit 'blocks.0'",
    ),
    "no barrier before a write": (
        lambda: mock.patch.object(Axis, "barrier"),
        _looks_back(3, MEMORY),
        (),
        Race,
        "its owner",
    ),
    "a gather under way at a write": (
        lambda: mock.patch.object(engine, "Versions", _GathersStayUnderWay),
        _looks_back(1, MEMORY),
        (),
        AssertionError,
        "all_gather of unit 'blocks.1'",
    ),
    "weights are used before they have come": (
        lambda: mock.patch.object(Bucket, "finish_gather", _gather_at_once),
        _one_skips(3, MEMORY),
        (),
        AssertionError,
        "nan",
    ),
    "nobody notices a death": (
        lambda: mock.patch.object(Ranks, "can_read", return_value=True),
        _one_skips(3, MEMORY),
        ("death",),
        Deadlock,
        "after: death of rank",
    ),
}


def test_schedules_that_are_broken_on_purpose_are_found_out() -> None:
    """The first three are hangs that onecopy had once, and that virtual ranks find in the code of that time too."""

    def find(_: int) -> dict[str, tuple[str, bool, str]]:
        found = {}
        for name, (broken, plan, faults, kind, _words) in BROKEN.items():
            try:
                with broken():
                    explore(plan, faults=faults, most=1000)
            except AssertionError as error:
                found[name] = type(error).__name__, isinstance(error, kind), str(error)
            else:
                found[name] = "nothing", False, ""
        return found

    found = run_ranks(1, find, group=False)[0]
    for name, (_, _, _, kind, words) in BROKEN.items():
        assert found[name][1], f"{name}: expected a {kind.__name__}, found {found[name]}"
        assert words in found[name][2], f"{name}: {found[name][2]}"
