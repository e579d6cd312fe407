"""onecopy's stages beside every peer: step time, memory, traffic and the optimizer's share, in one run.

    python benchmarks/compare.py --fast
    sudo python benchmarks/compare.py --case gpt-30m --ranks 2 4 --micro-batches 1 4 --json results.json

Times are ratios, taken step by step in one run (`contest.py`); a time counts only if its losses agree with DDP's. The
floor, "no communication", is what every system has to compute (`floor.py`): a target below it is out of reach here.
DeepSpeed and FairScale take part where they are installed. DeepSpeed compiles an extension at its first start, which
takes g++ some five minutes: let it end, for a build that is killed leaves a lock behind. Bytes on the wire need root,
for network namespaces. Whatever cannot be had is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch

import overhead
from harness.contest import Contest, Timed, hold
from harness.namespaces import unavailable
from harness.systems import FLOOR, SYSTEMS
from harness.weighing import EXPLAINED, account
from harness.work import Work
from onecopy.comm.cross_memory import SWITCH
from onecopy.report.machine import describe_machine
from trained.cases import CASES, DTYPES


@dataclass(frozen=True)
class Target:
    """A step time that onecopy is to have, as a share of a peer's."""

    system: str
    peer: str
    ratio: float


TARGETS: Final = (
    *(Target(f"onecopy stage {stage}", "DDP", ratio) for stage, ratio in ((1, 0.95), (2, 0.95), (3, 1.0))),
    *(Target(f"onecopy stage {stage}", "DDP + ZeroRedundancyOptimizer", 0.8) for stage in (1, 2)),
    Target("onecopy stage 3", "fully_shard, reshard_after_forward=True", 0.65),
    *(Target(f"onecopy stage {stage}", f"DeepSpeed stage {stage}", 0.5) for stage in (1, 2, 3)),
)

OVERHEAD: Final = tuple(overhead.Case("linear", 100, ranks, stage) for stage in (1, 2, 3) for ranks in (8, 1024))
"""For which nets and groups the engine's own time is taken."""

_MIB: Final = 2**20


def unreachable(contest: Contest, target: Target) -> float | None:
    """The floor over the target's peer if, as it is shown, it lies above the target; else None."""
    floor = contest.floor_ratio(target.peer)
    return None if floor is None or met(floor[0], target.ratio) else floor[0]


def systems_table(contest: Contest) -> str:
    """One line for each system, and one for the floor: what it took, and its step time over DDP's."""
    heads = (
        "step s",
        "/ DDP (quartiles)",
        "optimizer s",
        "RSS MiB",
        "meter MiB",
        "formula MiB",
        "sent MiB",
        "paper MiB",
    )
    lines = ["| system | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    counted = contest.agreeing
    for name in SYSTEMS:
        if name not in contest.timed and name not in contest.weighed:
            continue
        cells = [""] * len(heads)
        if name in counted:
            cells[:3] = time_cells(counted[name], contest.ratio(name, "DDP") if "DDP" in counted else None)
        if name in contest.weighed:
            weighed = contest.weighed[name]
            meter = None if weighed.meter is None else sum(weighed.meter.values())
            sizes = (weighed.resident, meter, weighed.formula, weighed.sent, weighed.paper)
            cells[3:] = ["" if size is None else f"{size / _MIB:.1f}" for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if contest.floor is not None:
        cells = [""] * len(heads)
        cells[:3] = time_cells(contest.floor, contest.floor_ratio("DDP") if "DDP" in counted else None)
        lines.append(f"| the floor: {FLOOR} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time_cells(timed: Timed, ratio: tuple[float, float, float] | None) -> list[str]:
    """Medians of the step's seconds and of the optimizer's, with the ratio between them."""
    seconds, optimizer = statistics.median(timed.seconds), statistics.median(timed.optimizer)
    return [f"{seconds:.3f}", "" if ratio is None else _spread(ratio), f"{optimizer:.4f}"]


def targets_table(contest: Contest) -> str:
    """Each target beside what was measured and the floor; memory beside the peers of the same stage."""
    lines = ["| onecopy | peer | target | found (quartiles) | floor | |", "|---|---|---|---|---|---|"]
    counted = contest.agreeing
    for target in TARGETS:
        if target.system in counted and target.peer in counted:
            found, floor = contest.ratio(target.system, target.peer), contest.floor_ratio(target.peer)
            verdict, out = _verdict(found[0], target.ratio), unreachable(contest, target)
            if not met(found[0], target.ratio) and out is not None:
                verdict += f", out of reach here: the floor is {out:.2f}"
            lines.append(
                f"| {target.system} | {target.peer} | time ≤ {target.ratio:.2f} | {_spread(found)} | "
                f"{'' if floor is None else f'{floor[0]:.2f}'} | {verdict} |"
            )
    for name, peer in itertools.product(contest.weighed, repeat=2):
        ours = name.startswith("onecopy") and not peer.startswith("onecopy")
        if ours and SYSTEMS[name].stage == SYSTEMS[peer].stage:
            found_memory = contest.weighed[name].resident / contest.weighed[peer].resident
            lines.append(f"| {name} | {peer} | RSS ≤ 1.00 | {found_memory:.2f} | | {_verdict(found_memory, 1.0)} |")
    return "\n".join(lines)


def account_table(contest: Contest) -> str:
    """The memory of onecopy's stages beside formula, activations and named buffers, MiB."""
    heads = (
        "found",
        "formula",
        "activations",
        "named buffers",
        "found / expected",
        f"≤ {EXPLAINED:.2f}",
        "slices beside",
    )
    lines = ["| system | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name, weighed in contest.weighed.items():
        found = account(weighed, SYSTEMS[name].stage, contest.work.precision)
        if found is not None:
            named = ", ".join(f"{kind} {size / _MIB:.1f}" for kind, size in found.named.items())
            sizes = (found.found, found.formula, found.activations)
            cells = [*(f"{size / _MIB:.1f}" for size in sizes), named, f"{found.ratio:.3f}"]
            cells += [_verdict(found.ratio, EXPLAINED, digits=3), f"{found.slices / _MIB:.1f}"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    return f"{middle:.2f} ({low:.2f} – {high:.2f})"


def met(found: float, target: float, digits: int = 2) -> bool:
    """Whether a figure, as it is shown, is at most its target."""
    return round(found, digits) <= target


def _verdict(found: float, target: float, digits: int = 2) -> str:
    return "met" if met(found, target, digits) else f"missed by {found - target:.{digits}f}"


def report(contest: Contest) -> str:
    """What is printed for one piece of work."""
    parts = [f"## {contest.work}, {contest.parameters / 1e6:.1f} M parameters\n", systems_table(contest)]
    for table in (targets_table(contest), account_table(contest)):
        if table.count("\n") > 1:
            parts += ["", table]
    parts += [
        f"\nnot counted: {name}, whose losses differ by {timed.deviation:.1e} (allowed: {contest.work.tolerance:.0e})"
        for name, timed in contest.timed.items()
        if name not in contest.agreeing
    ]
    parts += [f"\nleft out: {name}: {reason}" for name, reason in contest.left_out.items()]
    return "\n".join(parts) + "\n"


def overhead_report(found: list[overhead.Measured]) -> str:
    """The engine's own time beside its target, in words."""
    worst = max(found, key=lambda one: one.engine())
    verdict = _verdict(worst.engine(), overhead.TARGET, digits=0)
    return (
        f"## Engine overhead, µs per unit and step on torch's fake process group\n\n"
        f"{overhead.table(found, 'ranks')}\n\ntarget {overhead.TARGET:.0f}, the worst: {verdict}\n"
    )


def document(contests: list[Contest], engine: list[overhead.Measured], options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured, with the machine and what was asked."""
    versions = {}
    for package in ("torch", "deepspeed", "fairscale"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    asked = {name: value for name, value in vars(options).items() if name != "json"}
    return {
        "machine": describe_machine(torch.device("cpu")),
        "load": os.getloadavg(),
        "versions": versions,
        "options": asked,
        "contests": [asdict(contest) for contest in contests],
        "overhead": [one.to_json() for one in engine],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=["gpt-30m"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="in a step")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help="some of: " + "; ".join(SYSTEMS))
    parser.add_argument("--samples", type=int, help="a rank in a micro-batch, instead of the case's own")
    parser.add_argument("--size", type=int, help="tokens a sample, or pixels along a side, instead of the case's own")
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each system; 0 takes no times")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--sockets", action="store_true", help="onecopy reads no peer's memory, as between machines")
    parser.add_argument("--no-memory", action="store_true", help="take neither memory nor traffic")
    parser.add_argument("--no-overhead", action="store_true", help="do not take the engine's own time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a system alone; all together get 4 ×")
    parser.add_argument("--fast", action="store_true", help="gpt-3m on 2 ranks with few steps: under 2 minutes")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args(arguments)
    if options.fast:
        options.case, options.ranks, options.steps, options.warmup, options.size = ["gpt-3m"], [2], 5, 1, 32
    return options


def _save(contests: list[Contest], engine: list[overhead.Measured], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(document(contests, engine, options), indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    # So that a polite end, too, passes through the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reason = None if options.no_memory else unavailable()
    if reason is not None:
        print(f"left out: bytes on the wire: {reason}\n")
    if options.sockets:
        os.environ[SWITCH] = "0"
    contests = []
    began = monotonic()
    for case, ranks, precision, micro_batches in itertools.product(
        options.case, options.ranks, options.precision, options.micro_batches
    ):
        samples, size = options.samples or CASES[case].samples, options.size or CASES[case].size
        work = Work(
            *(case, precision, micro_batches, ranks, samples, size), options.steps, options.warmup, options.threads
        )
        network = not options.no_memory and reason is None
        systems = {name: system for name, system in SYSTEMS.items() if not options.only or name in options.only}
        contests.append(hold(work, systems, weigh=not options.no_memory, network=network, limit=options.limit))
        print(report(contests[-1]), flush=True)
        _save(contests, [], options)
    if not options.no_overhead:
        # At last, for it computes here, and ranks are to be forked from a process that has not.
        torch.set_num_threads(1)
        engine = [overhead.measure(case, rounds=7) for case in OVERHEAD]
        print(overhead_report(engine))
        _save(contests, engine, options)
    print(f"{monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
