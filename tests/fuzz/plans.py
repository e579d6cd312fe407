"""Random plans: which rank's data leads through which blocks, in which order, and what goes wrong on the way.

A plan is trained by sharded ranks and by one process that averages what each rank computes, as DDP defines it. Nothing
here knows how onecopy schedules its messages. `python tests/fuzz/plans.py --plans 1000` runs many,
tests/fuzz/test_plans.py some.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

# Ranks are forked from a process that runs no threads.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import onecopy
from models import FailsBackward, seeded, vector_batches
from onecopy.errors import CollectiveError
from oracle import assert_same_weights, gathered_weights, part, whole_weights
from ranks import run_ranks

BLOCKS = 5


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 10), nn.Tanh(), nn.LayerNorm(10))


class PutsAside(nn.Module):
    """Keeps a term of the loss to itself, which backward reaches before anything that forward returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.probe = nn.Linear(10, 1)
        self.aside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.aside.append(self.probe(y).square().mean())
        return y


class PartlyFrozen(nn.Module):
    """A frozen weight whose values are needed for the gradient of the input, and a bias used every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(10))
        self.shift = nn.Parameter(torch.zeros(10))
        self.uses_shift = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x) * self.scale
        return torch.tanh(x + self.shift if self.uses_shift else x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 10)
        kinds = [Plain, PutsAside, PartlyFrozen, Plain, Plain]
        self.blocks = nn.ModuleList(kind() for kind in kinds[:BLOCKS])
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor, visit: Visit) -> Tensor:
        aside: list[Tensor] = []
        self.blocks[1].aside = aside
        self.blocks[2].uses_shift = visit.uses_shift
        if visit.uses_entry:
            x = torch.tanh(self.entry(x))
        for position, block in enumerate(visit.route):
            if visit.fails_in_forward == position:
                raise ArithmeticError("on purpose")
            x = x + self.blocks[block](x)
            if visit.fails_in_backward == position:
                x = FailsBackward.apply(x)
        loss = F.mse_loss(self.head(x), y)
        return loss + 0.1 * sum(aside) if aside else loss


@dataclass(frozen=True)
class Visit:
    """What one rank does in one micro-batch."""

    route: tuple[int, ...]
    uses_entry: bool = True
    uses_shift: bool = True
    fails_in_forward: int | None = None
    fails_in_backward: int | None = None
    evaluates: tuple[tuple[int, ...], ...] = ()

    def without_faults(self) -> Visit:
        return replace(self, fails_in_forward=None, fails_in_backward=None)


@dataclass(frozen=True)
class Plan:
    """Micro-batches of all ranks, and how they are trained."""

    num_ranks: int
    stage: int
    accumulate: int
    prefetch: int
    bucket_bytes: int | None
    visits: tuple[tuple[Visit, ...], ...] = field(repr=True)

    @property
    def fails(self) -> list[bool]:
        """For each micro-batch whether some rank's backward raises."""
        return [any(visit.fails_in_backward is not None for visit in visits) for visits in self.visits]


def random_plan(seed: int, num_ranks: int, stage: int) -> Plan:
    """The plan of that number."""
    r = random.Random(seed * 1000 + num_ranks * 10 + stage)
    share = r.choice([0.2, 0.5, 0.8, 1.0])
    alike = r.random() < 0.15

    def route() -> tuple[int, ...]:
        chosen = [block for block in range(BLOCKS) if r.random() < share]
        if r.random() < 0.3:
            r.shuffle(chosen)
        if chosen and r.random() < 0.2:
            chosen.insert(r.randrange(len(chosen)), r.choice(chosen))
        return tuple(chosen)

    def visit(breaks: bool) -> Visit:
        found = route()
        inside = r.randrange(len(found)) if found else None
        return Visit(
            found,
            uses_entry=r.random() < 0.8,
            uses_shift=r.random() < 0.7,
            fails_in_forward=inside if r.random() < 0.1 else None,
            fails_in_backward=inside if breaks and r.random() < 0.5 else None,
            evaluates=tuple(route() for _ in range(r.choice([0, 0, 0, 1, 2]))),
        )

    steps = r.choice([2, 3, 4])
    accumulate = r.choice([1, 1, 2])
    visits = []
    for number in range(steps * accumulate):
        breaks = accumulate == 1 and number and r.random() < 0.15
        visits.append(tuple(visit(bool(breaks)) for _ in range(num_ranks)))
        if alike:
            visits[-1] = (visits[-1][0],) * num_ranks
    if r.random() < 0.3:
        visits[0] = tuple(Visit(tuple(range(BLOCKS))) for _ in range(num_ranks))
    return Plan(num_ranks, stage, accumulate, r.choice([0, 1, 1, 2]), r.choice([None, None, 256]), tuple(visits))


def train_plan(rank: int, plan: Plan) -> None:
    """Train ``plan`` as rank ``rank`` of a sharded model and as one process; weights and unused parameters agree."""
    batches = vector_batches(len(plan.visits), rows=plan.num_ranks * 2)
    twin = seeded(Routed)
    twin_optimizer = SGD(twin.parameters(), lr=0.05, momentum=0.9)
    model = onecopy.shard(
        seeded(Routed), plan.stage, accumulate=plan.accumulate, prefetch=plan.prefetch, bucket_bytes=plan.bucket_bytes
    )
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index, (batch, visits, fails) in enumerate(zip(batches, plan.visits, plan.fails, strict=True), start=1):
        mine, own = visits[rank], part(batch, rank, plan.num_ranks)
        for route in mine.evaluates:
            with torch.no_grad():
                found = model(*own, Visit(route))
                torch.testing.assert_close(found, twin(*own, Visit(route)), rtol=1e-5, atol=1e-6)
        if mine.fails_in_forward is not None:
            try:
                model(*own, mine)
            except ArithmeticError:
                pass
            else:
                raise AssertionError("the forward did not fail")
        try:
            model(*own, replace(mine, fails_in_forward=None)).backward()
        except (ArithmeticError, CollectiveError):
            if not fails:
                raise
        else:
            assert not fails, "a rank's backward failed and this rank did not hear of it"
        if fails:
            optimizer.zero_grad()
            continue
        for other in range(plan.num_ranks):
            (twin(*part(batch, other, plan.num_ranks), visits[other].without_faults()) / plan.num_ranks).backward()
        if index % plan.accumulate:
            continue
        unused = {n for n, p in twin.named_parameters() if p.grad is None}
        assert {n for n, p in model.named_parameters() if p.grad is None} == unused
        for o in (twin_optimizer, optimizer):
            o.step()
            o.zero_grad()
    assert_same_weights(gathered_weights(model), whole_weights(twin), atol=2e-6, rtol=1e-6)


def run_plans(seeds: list[int], num_ranks: int, stage: int, transport: str, *, limit: float = 12.0) -> None:
    """Train the plans of those numbers, one after the other, on the same ranks."""

    def run(rank: int) -> None:
        for seed in seeds:
            plan = random_plan(seed, num_ranks, stage)
            try:
                train_plan(rank, plan)
            except BaseException as error:
                error.add_note(f"plan {seed}: {plan}")
                raise

    run_ranks(num_ranks, run, timeout=limit * len(seeds) + 30, group_timeout=limit, transport=transport)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    wanted = parser.parse_args()
    failed, began, done = 0, time.monotonic(), 0
    chunk = 25
    turns = [(n, stage, transport) for n in (2, 3, 4) for stage in range(4) for transport in ("memory", "sockets")]
    for number, seed in enumerate(range(wanted.first, wanted.first + wanted.plans, chunk)):
        num_ranks, stage, transport = turns[number % len(turns)]
        seeds = list(range(seed, min(seed + chunk, wanted.first + wanted.plans)))
        try:
            run_plans(seeds, num_ranks, stage, transport)
        except AssertionError as error:
            failed += 1
            print(f"--- N = {num_ranks}, stage {stage}, {transport}\n{error}", flush=True)
        done += len(seeds)
    print(f"{done} plans in {time.monotonic() - began:.0f} s; runs of {chunk} that failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main()
