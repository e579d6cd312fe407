"""What the ledger costs: the share of a step that goes into booking collectives. It should be under 1 %.

    python benchmarks/ledger_cost.py

Two answers, for each stage. One is counted: the bookings of a step, times what one takes when it is done over and over,
over the step's median time. The other is a witness, as good as the machine is quiet: steps with a ledger that books,
over steps with one that does not, interleaved on the same ranks and data. Beside a GPT stands the worst there is: many
narrow layers on torch's fake process group, where nothing is computed or sent to speak of.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
import torch.distributed as dist

import onecopy
from harness.fake import fake_group
from harness.forks import run_ranks
from onecopy.observe.ledger import Entry, Ledger
from trained.cases import CASES, Case
from trained.nets import Narrow

TARGET: Final = 0.01


class Silent(Ledger):
    """A ledger that books nothing."""

    def record(self, *_: object, **__: object) -> None:
        pass

    def close_step(self) -> None:
        pass


@dataclass(frozen=True)
class Cost:
    """Of one stage on one model.

    Attributes:
        bookings: in a step.
        booking: seconds of one.
        with_ledger, without: seconds of each step.
    """

    model: str
    stage: int
    bookings: int
    booking: float
    with_ledger: list[float]
    without: list[float]

    @property
    def counted(self) -> float:
        """The ledger's share of a step."""
        return self.bookings * self.booking / statistics.median(self.with_ledger)

    @property
    def witnessed(self) -> tuple[float, float, float]:
        """Median and quartiles of a step with the ledger over the one without it beside it."""
        pairs = [own / other for own, other in zip(self.with_ledger, self.without, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
        return middle, low, high


def measure(name: str, case: Case, stage: int, rank: int, steps: int) -> Cost:
    """Interleaved steps with and without booking, on this rank of the process group."""
    steppers = [_stepper(case, stage, rank) for _ in range(2)]
    (books, book), (is_silent, silent) = steppers
    for _ in range(3):
        book()
        silent()
    last = onecopy.ledger(books).last_step
    assert last is not None
    # Its engine and all its axes hold this object.
    onecopy.ledger(is_silent).__class__ = Silent
    taken: list[list[float]] = [[], []]
    for number in range(steps):
        for position in (number % 2, 1 - number % 2):
            dist.barrier()
            taken[position].append((book, silent)[position]())
    bookings = sum(entry.calls for entry in last.entries)
    return Cost(name, stage, bookings, seconds_of_a_booking(last.entries), *taken)


def _stepper(case: Case, stage: int, rank: int) -> tuple[torch.nn.Module, Callable[[], float]]:
    torch.manual_seed(0)
    model = onecopy.shard(case.build(), stage)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(rank)

    def step() -> float:
        batch = case.draw(generator, case.samples, case.size)
        start = perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - start

    return model, step


def seconds_of_a_booking(entries: list[Entry], rounds: int = 500) -> float:
    """Seconds that one `Ledger.record` takes, over the entries of a step, with a share in turning the page."""
    ledger = Ledger()
    start = perf_counter()
    for _ in range(rounds):
        for e in entries:
            ledger.record(e.op, e.unit, e.axis, phase=e.phase, sent=e.bytes_sent, seconds=0.1, exposed=0.1)
        ledger.close_step()
    return (perf_counter() - start) / rounds / len(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="gpt-3m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args()

    def in_rank(rank: int, write: Callable[[str], None], stage: int) -> None:
        write(json.dumps(asdict(measure(options.case, CASES[options.case], stage, rank, options.steps))))

    costs = []
    for stage in options.stages:
        lines = run_ranks(options.ranks, in_rank, stage, limit=120.0)
        costs.append(Cost(**json.loads(lines[0][-1])))
    torch.set_num_threads(1)
    narrow = Case(lambda: Narrow("linear", 100), CASES["narrow"].draw, samples=1, size=4)
    for stage in options.stages:
        with fake_group(8):
            costs.append(measure("100 narrow layers, fake group", narrow, stage, 0, options.steps))
    print("| model | stage | bookings a step | µs each | share of the step | step with / without (quartiles) |")
    print("|---|---|---|---|---|---|")
    for cost in costs:
        middle, low, high = cost.witnessed
        print(
            f"| {cost.model} | {cost.stage} | {cost.bookings} | {1e6 * cost.booking:.2f} | {cost.counted:.2%} "
            f"| {middle:.3f} ({low:.3f} – {high:.3f}) |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
