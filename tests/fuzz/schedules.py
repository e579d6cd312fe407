"""Schedules: what virtual ranks do (`virtual.py`), and which of their interleavings are tried.

`explore` tries every interleaving of a small plan: it remembers each state of the world and takes every way out of it
once. `run_at_random` draws a plan, an order and a fault by number. `python tests/fuzz/schedules.py --schedules 100000`
does that many; tests/fuzz/test_model.py a few. What ranks arrive at is held against one process that averages what each
computes, as DDP defines it.

A plain generator draws, and not hypothesis: a schedule needs hundreds of draws, made in whichever thread runs, and
hypothesis doubles its time. Its number alone brings a schedule back.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import onecopy
from models import FailsBackward
from onecopy.errors import CollectiveError
from virtual import Ranks, virtually
from virtual_gloo import Mesh

WIDTH = 2


@dataclass(frozen=True)
class Visit:
    """What one rank does in one micro-batch.

    Attributes:
        route: the blocks that its data leads through, in order.
        uses_head: whether the head comes after them; without it, and without blocks, the rank's loss uses nothing.
        evaluates: routes of forwards without a graph before it.
        looks_back: the same between its backward and the step that may follow.
        fails: whether its backward raises before it comes to the first block of the route.
        again: the forward is run twice, and the first one's graph is thrown away.
        breaks: before that there is a forward that raises after the first block.
    """

    route: tuple[int, ...]
    uses_head: bool = True
    evaluates: tuple[tuple[int, ...], ...] = ()
    looks_back: tuple[tuple[int, ...], ...] = ()
    fails: bool = False
    again: bool = False
    breaks: bool = False


@dataclass(frozen=True)
class Plan:
    """Micro-batches of all ranks, and how they are trained.

    Attributes:
        machines: of each rank; on one machine they exchange through memory.
        shape: (replicas, shards); None shards over all ranks.
        is_bare: each unit has one parameter, and none is the root's.
        clips: gradients are clipped before each step.
        edits: weights are changed by hand after each step.
        quiet: micro-batches that go before what `explore` tries in every order.
    """

    stage: int
    machines: tuple[int, ...]
    visits: tuple[tuple[Visit, ...], ...]
    blocks: int = 2
    accumulate: int = 1
    prefetch: int = 1
    bucket_bytes: int | None = None
    frozen: tuple[int, ...] = ()
    shape: tuple[int, int] | None = None
    is_bare: bool = False
    clips: bool = False
    edits: bool = False
    quiet: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.machines)


MEMORY, SOCKETS = (0, 0), (0, 1)

EVERYWHERE = ("ready", "look", "write")
"""Where a rank gives way, beside waits for what has not come yet."""
AT_NEED = ("look", "write")
"""The same, but not where what a rank waits for has come already: that leaves a fifth of the states."""


class Routed(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=not plan.is_bare) for _ in range(plan.blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=not plan.is_bare)
        self.scale = None if plan.is_bare else nn.Parameter(torch.empty(()))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for block in plan.frozen:
            self.blocks[block].requires_grad_(False)

    def forward(self, x: Tensor, visit: Visit) -> Tensor:
        for position, block in enumerate(visit.route):
            x = torch.tanh(self.blocks[block](x))
            if visit.breaks:
                raise ArithmeticError("on purpose")
            if position == 0 and visit.fails:
                x = FailsBackward.apply(x)
        if visit.uses_head:
            x = self.head(x)
        return (x if self.scale is None else x * self.scale).square().mean()


def _batch(number: int, rank: int) -> Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def train_alone(plan: Plan) -> list[Tensor]:
    """The weights after the plan's steps, by the definition: gradients averaged over ranks."""
    model = Routed(plan)
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, visits in enumerate(plan.visits, start=1):
        if any(visit.fails for visit in visits):
            optimizer.zero_grad()
            continue
        for rank, visit in enumerate(visits):
            (model(_batch(number, rank), replace(visit, breaks=False)) / plan.num_ranks).backward()
        if number % plan.accumulate == 0:
            _step(plan, model, optimizer)
            _edit(plan, model)
    return [parameter.detach() for parameter in model.parameters()]


def train(world: Ranks, plan: Plan) -> list[Tensor]:
    """The same on the rank that is running. Returns whole weights."""
    model = onecopy.shard(
        Routed(plan),
        plan.stage,
        units=[*(f"blocks.{block}" for block in range(plan.blocks)), "head"],
        mesh=None if plan.shape is None else Mesh(world.gloo, plan.shape),
        accumulate=plan.accumulate,
        prefetch=plan.prefetch,
        bucket_bytes=plan.bucket_bytes,
    )
    optimizer = SGD(model.parameters(), lr=0.1)
    numbers = range(1, len(plan.visits) + 1)
    for number in numbers[: plan.quiet]:
        _train_one(world, plan, number, model, optimizer)
    with world.open_part():
        for number in numbers[plan.quiet :]:
            _train_one(world, plan, number, model, optimizer)
    with onecopy.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def _train_one(world: Ranks, plan: Plan, number: int, model: nn.Module, optimizer: SGD) -> None:
    """One micro-batch, and the step that may follow it. Who is told of a lost rank does not give up at once."""
    fails = any(visit.fails for visit in plan.visits[number - 1])
    try:
        _pass(world, plan, number, model)
    except CollectiveError:
        if world.struck is None and fails:
            # Of another rank's backward that has failed, and all know it.
            optimizer.zero_grad()
            return
        if world.struck is None or fails or plan.accumulate > 1:
            raise
        world.went_on = True
        optimizer.zero_grad()
        _pass(world, plan, number, model)
    if fails:
        optimizer.zero_grad()
    elif number % plan.accumulate == 0:
        _step(plan, model, optimizer)
        if plan.edits:
            with onecopy.gathered(model, write=True):
                _edit(plan, model)


def _pass(world: Ranks, plan: Plan, number: int, model: nn.Module) -> None:
    """Forwards and a backward."""
    visits = plan.visits[number - 1]
    visit, batch = visits[world.rank], _batch(number, world.rank)
    _evaluate(model, batch, visit.evaluates)
    if visit.breaks:
        with suppress(ArithmeticError):
            model(batch, visit)
        visit = replace(visit, breaks=False)
    if visit.again:
        model(batch, visit)
    with suppress(ArithmeticError) if visit.fails else nullcontext():
        model(batch, visit).backward()
        assert not any(v.fails for v in visits), "a rank's backward failed and this rank did not hear of it"
    _evaluate(model, batch, visit.looks_back)


def _step(plan: Plan, model: nn.Module, optimizer: SGD) -> None:
    if plan.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _edit(plan: Plan, model: nn.Module) -> None:
    if plan.edits:
        for parameter in model.parameters():
            parameter.mul_(0.9)


@torch.no_grad()
def _evaluate(model: nn.Module, batch: Tensor, routes: Sequence[tuple[int, ...]]) -> None:
    for route in routes:
        model(batch, Visit(route))


def run(plan: Plan, world: Ranks) -> None:
    """Train ``plan`` in ``world``.

    Raises:
        AssertionError: if ranks hang, race, arrive at other weights than one process does, or end without an error
            that names what happened when a fault struck one of them.
    """
    ranks = world.run(lambda rank: train(world, plan))
    unnamed = [rank for rank in ranks if rank.error is not None and not isinstance(rank.error, CollectiveError)]
    failed = unnamed or ([] if world.struck else [rank for rank in ranks if rank.error is not None])
    if failed:
        raise AssertionError(f"{failed[0].name} failed{_after(world)}: {failed[0].error!r}") from failed[0].error
    expected = train_alone(plan)
    for rank in ranks:
        if rank.error is None and rank.rank not in world.dead:
            for found, wanted in zip(rank.result, expected, strict=True):
                assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), f"{rank.name}: {found} is not {wanted}"


def _after(world: Ranks) -> str:
    return f" after: {world.struck}" if world.struck else ""


# --- every interleaving


class _Seen(BaseException):
    """What comes now has been tried."""


class _Explorer:
    """Follows a prefix of choices, and from there on takes the first way out of every state that it has not seen."""

    def __init__(self, prefix: Sequence[tuple[int, int]], seen: set[Hashable], stops: Sequence[str]) -> None:
        self.taken: list[tuple[int, int]] = []
        self.left: list[list[tuple[int, int]]] = []
        self._prefix = prefix
        self._seen = seen
        self._stops = stops

    def choose(self, runs: int, faults: int, state: Callable[[], Hashable]) -> int:
        count, place = runs + faults, len(self.taken)
        if place < len(self._prefix):
            chosen, expected = self._prefix[place]
            assert count == expected, "the same choices lead to another state"
        else:
            if (here := state()) in self._seen:
                raise _Seen
            self._seen.add(here)
            chosen = 0
            self.left += [[*self.taken, (other, count)] for other in range(1, count)]
        self.taken.append((chosen, count))
        return chosen

    def may_stop(self, at: str) -> bool:
        return at in self._stops


def explore(
    plan: Plan,
    *,
    faults: Sequence[str] = (),
    stops: Sequence[str] = EVERYWHERE,
    most: int | None = None,
) -> tuple[int, int]:
    """Run ``plan`` in every order, with each fault at every wait. Returns how many states there were, and runs.

    Args:
        stops: where a rank gives way, beside waits for what has not come yet.
        most: how many runs are allowed.
    """
    seen: set[Hashable] = set()
    left: list[list[tuple[int, int]]] = [[]]
    runs = 0
    with virtually():
        while left:
            explorer = _Explorer(left.pop(), seen, stops)
            world = Ranks(plan.machines, explorer, faults=faults, quiet=True)
            try:
                run(plan, world)
            except _Seen:
                pass
            except AssertionError as error:
                error.add_note(f"choices: {[chosen for chosen, _ in explorer.taken]} in {plan}")
                raise
            left += explorer.left
            runs += 1
            if most is not None and runs > most:
                raise RuntimeError(f"more than {most} runs, and {len(left)} left")
    return len(seen), runs


# --- some at random


class _Dice:
    """Draws who goes on: all alike, or as a rule the first in an order that changes now and then."""

    def __init__(self, r: random.Random, fault_at: int | None) -> None:
        self._r = r
        self._fault_at = fault_at
        self._stops = r.choice([0.0, 0.2, 0.6])
        self._keeps_order = r.random() < 0.5
        self._order: list[int] = []
        self._drawn = 0

    def choose(self, runs: int, faults: int, state: Callable[[], Hashable]) -> int:
        self._drawn += 1
        if faults and self._drawn == self._fault_at:
            return runs + self._r.randrange(faults)
        if not self._keeps_order:
            return self._r.randrange(runs)
        if self._r.random() < 0.05 or len(self._order) < runs:
            self._order = self._r.sample(range(runs), runs)
        return next(place for place in self._order if place < runs)

    def may_stop(self, at: str) -> bool:
        return self._r.random() < (0.8 if at == "ready" else self._stops)


def random_plan(r: random.Random) -> Plan:
    """A plan for 2 to 4 ranks on one or two machines."""
    num_ranks = r.choice([2, 2, 2, 2, 3, 3, 4])
    machines = r.choice([(0,) * num_ranks, tuple(range(num_ranks)), tuple(r.randrange(2) for _ in range(num_ranks))])
    blocks = r.choice([1, 1, 2, 2, 3])
    share = r.choice([0.3, 0.6, 0.9])
    accumulate = r.choice([1, 1, 1, 2])

    def route() -> tuple[int, ...]:
        chosen = [block for block in range(blocks) if r.random() < share]
        if r.random() < 0.3:
            r.shuffle(chosen)
        if chosen and r.random() < 0.2:
            chosen.append(r.choice(chosen))
        return tuple(chosen)

    def visit(breaks: bool) -> Visit:
        evaluates, looks_back = (tuple(route() for _ in range(r.choice([0, 0, 0, 1]))) for _ in range(2))
        found = route()
        # A backward comes to the first block only if there is one, and if it has something to learn.
        fails = breaks and bool(found) and found[0] not in frozen and r.random() < 0.5
        return Visit(found, r.random() < 0.8, evaluates, looks_back, fails, r.random() < 0.1, r.random() < 0.1)

    frozen = tuple(block for block in range(blocks) if r.random() < 0.1)
    visits = []
    for number in range(r.choice([1, 1, 2, 2, 3]) * accumulate):
        breaks = accumulate == 1 and number > 0 and r.random() < 0.2
        visits.append(tuple(visit(breaks) for _ in range(num_ranks)))
    if r.random() < 0.4:
        visits[0] = (Visit(tuple(range(blocks))),) * num_ranks
    return Plan(
        stage=r.choice([0, 1, 2, 3, 3]),
        machines=machines,
        visits=tuple(visits),
        blocks=blocks,
        accumulate=accumulate,
        prefetch=r.choice([0, 1, 1, 2]),
        bucket_bytes=r.choice([None, None, None, 64]),
        frozen=frozen,
        clips=r.random() < 0.2,
        edits=r.random() < 0.2,
        shape=(2, 2) if num_ranks == 4 and r.random() < 0.4 else None,
    )


def run_at_random(number: int) -> str:
    """Run the schedule of that number. Returns the kind of fault in it, "" if there was none."""
    r = random.Random(number)
    plan = random_plan(r)
    faults = r.choice([(), (), (), ("death",), ("time-out",)])
    world = Ranks(
        plan.machines, _Dice(r, int(r.expovariate(1 / 60)) if faults else None), faults=faults, eager=r.random() < 0.5
    )
    try:
        run(plan, world)
    except AssertionError as error:
        error.add_note(f"schedule {number}: {plan}")
        raise
    return "" if world.struck is None else faults[0]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    began, failed = time.monotonic(), 0
    gc.freeze()
    with virtually():
        for number in range(wanted.first, wanted.first + wanted.schedules):
            try:
                kinds[run_at_random(number)] += 1
            except AssertionError as error:
                failed += 1
                print("---", error, *error.__notes__, sep="\n", flush=True)
            if number % 1000 == 0:
                print(f"{number}: {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    print(f"{wanted.schedules} schedules in {time.monotonic() - began:.0f} s, {dict(kinds)}; failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    _main()
