"""What each system really sends in a step, by the kernel's own count, beside what the ZeRO paper says it should.

    sudo python benchmarks/wire.py
    sudo python benchmarks/wire.py --rate 1gbit 100mbit --micro-batches 1 --batch 2 --length 128

Every rank runs in its own network namespace (`namespaces.py`), and the bytes that left by its interface are read before
and after a number of steps, each time behind a barrier. Nothing is subtracted: Ethernet, IP and TCP headers,
acknowledgements, control messages and the barrier itself are all in the figure (0.1 to 0.2 % on unshaped links, where
packets are large). The paper's figure is a stage's multiple of Ψ(N-1)/N (ZeRO §7), Ψ being the model's parameters:
2 for stages 0 and 1, g + 1 for stage 2, 3g for stage 3, with g micro-batches in a step.

With `--rate` the same steps are also timed on links that carry no more than that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist

import onecopy
from harness import systems
from harness.forks import RanksError, read_lines, run_ranks
from harness.namespaces import Network, bytes_sent, unavailable
from harness.systems import Settings
from onecopy.planner.formulas.traffic import step_elements
from trained.cases import DTYPES, SHAPES, Batch, tokens
from trained.gpt import GPT, Shape

__all__ = ["Case", "RanksError", "Work", "measure"]

FORMULAS: Final = {0: "2Ψ", 1: "2Ψ", 2: "(g+1)Ψ", 3: "3gΨ"}


@dataclass(frozen=True)
class Case:
    system: str
    precision: str
    micro_batches: int


@dataclass(frozen=True)
class Work:
    """What a step computes, and how many of them."""

    shape: Shape
    batch: int
    length: int
    steps: int
    warmup: int = 2
    limit: float = 1800.0
    """Seconds that all the cases on one network may take."""


@dataclass(frozen=True)
class Measured:
    """One case on one network.

    Attributes:
        paper: bytes that a rank sends in a step, by the paper.
        sent: the same, by the kernel's count, for each rank.
        ledger: the same, by onecopy's own count, for each rank; None for other systems.
        seconds: of each step, on the slowest rank.
    """

    system: str
    stage: int
    precision: str
    micro_batches: int
    ranks: int
    rate: str | None
    paper: float
    sent: list[float]
    ledger: list[float] | None
    seconds: list[float]


SYSTEMS: Final = {
    **{name: one for name, one in systems.SYSTEMS.items() if one.package in ("torch", "onecopy") and not one.floor},
    **{f"DeepSpeed stage {stage}": systems.deepspeed(stage, {}) for stage in (1, 2, 3)},
}
"""Each at its defaults."""


# --- in a rank


def _run_rank(rank: int, write: Callable[[str], None], cases: list[Case], work: Work) -> None:
    for case in cases:
        write(json.dumps(_measure_case(rank, case, work)))


def _measure_case(rank: int, case: Case, work: Work) -> dict[str, Any]:
    """This rank's bytes in a step, on average, and the seconds of each step."""
    torch.manual_seed(0)
    trainer = SYSTEMS[case.system].set_up(GPT(work.shape), Settings(case.precision, case.micro_batches))
    batches = _batches(rank, case, work)
    for _ in range(work.warmup):
        trainer.step(next(batches))
    booked = onecopy.ledger(trainer.sharded).total if trainer.sharded is not None else None
    counters, counted, seconds = [_count_apart()], booked.state_bytes if booked else 0, []
    for _ in range(work.steps):
        start = perf_counter()
        trainer.step(next(batches))
        seconds.append(perf_counter() - start)
        counters.append(_count_apart())
    sent = [after - before for before, after in itertools.pairwise(counters)]
    return {
        # On a busy machine TCP takes a late answer for a loss now and then, and sends again.
        "sent": statistics.median(sent),
        "ledger": (booked.state_bytes - counted) / work.steps if booked else None,
        "seconds": seconds,
    }


def _count_apart() -> int:
    """This rank's bytes so far, when no rank is in a step.

    Who has passed a barrier has received all it waited for, so all that was sent to it has left. Who has passed the
    second one may fetch slices for the next step.
    """
    dist.barrier()
    count = bytes_sent()
    dist.barrier()
    return count


def _batches(rank: int, case: Case, work: Work) -> Iterator[list[Batch]]:
    generator = torch.Generator().manual_seed(rank)
    draw = tokens(work.shape.vocabulary)
    while True:
        yield [draw(generator, work.batch, work.length) for _ in range(case.micro_batches)]


# --- in the launcher


def measure(cases: list[Case], num_ranks: int, work: Work, rate: str | None = None) -> list[Measured]:
    """Run ``cases`` one after the other on a network of their own, which is gone afterwards.

    The caller must run no threads: ranks are forked from it.

    Raises:
        RanksError: if they do not finish within the work's limit.
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that failed.
    """

    def progress(folder: Path) -> str:
        done = min(len(read_lines(folder, rank)) for rank in range(num_ranks))
        running = cases[min(done, len(cases) - 1)]
        return f"{done} of {len(cases)} cases done: {running} was running. Allow more with --limit, or do less"

    with Network(num_ranks, rate) as network:
        lines = run_ranks(num_ranks, _run_rank, cases, work, limit=work.limit, network=network, progress=progress)
    by_rank = [[json.loads(line) for line in own] for own in lines]
    parameters = count_parameters(work.shape)
    found = []
    for case, figures in zip(cases, zip(*by_rank, strict=True), strict=True):
        stage = SYSTEMS[case.system].stage
        elements = step_elements(stage, parameters, num_ranks, case.micro_batches).total
        ledger = [figure["ledger"] for figure in figures]
        found.append(
            Measured(
                **asdict(case),
                stage=stage,
                ranks=num_ranks,
                rate=rate,
                paper=elements * DTYPES[case.precision].itemsize,
                sent=[figure["sent"] for figure in figures],
                ledger=None if None in ledger else ledger,
                seconds=[max(step) for step in zip(*(figure["seconds"] for figure in figures), strict=True)],
            )
        )
    return found


def count_parameters(shape: Shape) -> int:
    """Ψ."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


# --- tables


def bytes_table(found: list[Measured], precision: str) -> str:
    """What was sent over Ψ(N-1)/N / what the paper says = the ratio; for each system, N and g."""

    def cell(one: Measured) -> str:
        multiple = step_elements(one.stage, 1.0, one.ranks, one.micro_batches).total * one.ranks / (one.ranks - 1)
        ratio = statistics.mean(one.sent) / one.paper
        text = f"{multiple * ratio:.2f} / {multiple:.0f} = {ratio:.3f}"
        worst = max(one.sent) / one.paper
        return f"{text} (one rank {worst:.3f})" if worst > 1.01 * ratio else text

    return _table([one for one in found if one.precision == precision and one.rate is None], _column, cell)


def seconds_table(found: list[Measured], precision: str) -> str:
    """Median seconds of a step; for each system, rate, N and g."""

    def column(one: Measured) -> str:
        return f"{one.rate or 'unshaped'}, {_column(one)}"

    return _table(
        [one for one in found if one.precision == precision],
        column,
        lambda one: f"{statistics.median(one.seconds):.3f}",
    )


def _column(one: Measured) -> str:
    return f"N={one.ranks} g={one.micro_batches}"


def _table(found: list[Measured], column: Callable[[Measured], str], cell: Callable[[Measured], str]) -> str:
    columns = list(dict.fromkeys(column(one) for one in found))
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        rows.setdefault(f"{one.system} | {FORMULAS[one.stage]}", {})[column(one)] = cell(one)
    lines = ["| system | paper | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    lines += [
        f"| {name} | " + " | ".join(cells.get(head, "") for head in columns) + " |" for name, cells in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help="some of: " + "; ".join(SYSTEMS))
    parser.add_argument("--model", choices=SHAPES, default="3m")
    parser.add_argument("--batch", type=int, default=1, help="samples a rank in a micro-batch")
    parser.add_argument("--length", type=int, default=8, help="tokens a sample; few, for CPUs that are slow in bf16")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each case")
    parser.add_argument("--rate", nargs="+", default=[], help="also shape the links to each of these, such as 100mbit")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all cases on one network")
    parser.add_argument("--json", help="file for everything measured")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    # So that a polite end, too, passes through the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    wanted = options.only or list(SYSTEMS)
    missing = {name: reason for name in wanted if (reason := SYSTEMS[name].obstacle)}
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}\n")
    cases = [
        Case(system, precision, micro_batches)
        for precision in options.precision
        for micro_batches in options.micro_batches
        for system in wanted
        if system not in missing
    ]
    work = Work(SHAPES[options.model], options.batch, options.length, options.steps, limit=options.limit)
    found = [
        one
        for rate in [None, *options.rate]
        for num_ranks in options.ranks
        for one in measure(cases, num_ranks, work, rate)
    ]
    parameters = count_parameters(work.shape)
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"options": asked, "parameters": parameters, "measured": [asdict(one) for one in found]}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    for precision in options.precision:
        print(f"Bytes a rank and step, {precision}: sent / paper = ratio, in units of Ψ(N-1)/N, Ψ = {parameters:,}")
        print(f"\n{bytes_table(found, precision)}\n")
        if options.rate:
            print(f"Median seconds of a step, {precision}\n\n{seconds_table(found, precision)}\n")


if __name__ == "__main__":
    main()
