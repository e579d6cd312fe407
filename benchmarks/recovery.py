"""What the loss of ranks costs, and whether anything is lost with them. 4 gloo ranks, from `onecopy run`.

    python benchmarks/recovery.py kills --losses 1000         # every result equal, bit for bit, to a run without losses
    python benchmarks/recovery.py kills --losses 40 --transport sockets
    python benchmarks/recovery.py kills --losses 100 --resize # fewer ranks go on, and more: equal to runs in stretches
    python benchmarks/recovery.py times --model small 30m     # from a kill to the first step after it, in its parts
    python benchmarks/recovery.py resize --model 30m          # until fewer ranks go on, and until more do
    python benchmarks/recovery.py price --model 30m           # a step with a mirror, or two copies, beside one without
    python benchmarks/recovery.py throughput --model 30m      # a loss every 20 steps

Kinds: SIGKILL (an OOM-kill is one), SIGSTOP, an exception, `os._exit(0)`. Moments: forward, backward, after the reduce,
before, at and after the commit point, half way through the update, the top of the loop (the next gather, a save), a
random one, and any of the recovery's own, on a second rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from onecopy.planner.formulas.recovery import lost_seconds_with_copies
from trained.survivor import Plan, Stretch

LIMIT = 600.0
"""Seconds that one run may take."""

RANKS = 4
SURVIVOR = Path(__file__).parent / "trained" / "survivor.py"


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        results: of each rank.
        resources: open files, threads and repairs of each rank.
        losses: what the plan has done: the file's name to its time and kind.
        repairs: from each rank's log.
        seconds: of the whole run.
        output: of the launcher.
    """

    results: list[dict[str, object]]
    resources: list[dict[str, int]]
    losses: dict[str, dict[str, object]]
    repairs: list[dict[str, float]]
    seconds: float
    output: str


def carry_out(
    plan: Plan,
    folder: Path,
    *,
    ranks: int = RANKS,
    spares: int = 2,
    heartbeat: float = 0.0,
    transport: str = "memory",
    options: tuple[str, ...] = (),
    stretch: Stretch | None = None,
) -> Ended:
    """Run the script once; every rank that is one at the end must come to its end.

    Args:
        options: more of `onecopy run`'s.
        stretch: the part of the plan that is to be trained; None: all.
    """
    folder.mkdir(parents=True, exist_ok=stretch is not None)
    all_options = [
        "--ranks",
        str(ranks),
        "--spares",
        str(spares),
        "--heartbeat",
        str(heartbeat),
        "--losses",
        str(10 * plan.steps + 10),
        *options,
    ]
    command = [sys.executable, "-m", "onecopy.cli.main", "run", *all_options, str(SURVIVOR), str(folder)]
    environment = os.environ | {
        "ONECOPY_CROSS_MEMORY": "1" if transport == "memory" else "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    began = time.monotonic()
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            [*command, json.dumps(asdict(plan)), *([json.dumps(asdict(stretch))] if stretch else [])],
            env=environment,
            stdout=output,
            stderr=output,
            timeout=LIMIT,
        )
    said = (folder / "output").read_text()
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}:\n{said[-4000:]}")
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("result-*.json"))]
    return Ended(
        [one["result"] for one in found],
        [one["resources"] for one in found],
        {file.name: json.loads(file.read_text()) for pattern in ("lost-*", "again-*") for file in folder.glob(pattern)},
        [json.loads(line) for file in folder.glob("log-*") for line in file.read_text().splitlines()],
        time.monotonic() - began,
        said,
    )


def stretches(folder: Path, steps: int, ranks: int) -> list[Stretch]:
    """The steps of a run whose number of ranks has changed, as its ranks have told of it.

    Who comes to make ranks more goes on with the free stream of random numbers that has the lowest number; who comes in
    another's place, with that one's.
    """
    generations: dict[int, tuple[list[str], int]] = {}
    for file in folder.glob("met-0-*.json"):
        told = json.loads(file.read_text())
        _, known = generations.get(told["generation"], ([], 0))
        # A newcomer knows of no steps yet.
        generations[told["generation"]] = told["members"], max(known, told["steps"])
    members = [f"process-{rank}" for rank in range(ranks)]
    streams = {name: rank for rank, name in enumerate(members)}
    found: list[Stretch] = []
    start = 0
    for _, (now, step) in sorted(generations.items()):
        found.append(Stretch(start, step, tuple(streams[name] for name in members)))
        stays = len(now) == len(members) and all(a == b or b not in streams for a, b in zip(members, now, strict=True))
        drawn = {name: streams[name] for name in now if name in streams}
        for rank, name in enumerate(now):
            if name not in drawn:
                free = {*range(ranks)} - {*drawn.values()}
                drawn[name] = streams[members[rank]] if stays else min(free)
        members, streams, start = now, drawn, step
    found.append(Stretch(start, steps, tuple(streams[name] for name in members)))
    return [one for one in found if one.stop > one.start]


def differences(expected: dict[str, object], found: dict[str, object]) -> dict[str, object]:
    """Where two results differ: in one bit, or in a sum of losses by more than the order of its terms makes."""
    losses = [float(one["metrics"]["loss"]) for one in (expected, found)]  # type: ignore[index]
    same = {"metrics"} if abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0]) else set()
    return {key: (expected[key], found[key]) for key in expected if key not in same and expected[key] != found[key]}


def compare_in_stretches(plan: Plan, folder: Path, transport: str, options: tuple[str, ...]) -> tuple[Ended, list[int]]:
    """Hold a run whose number of ranks changes against runs from checkpoint to checkpoint, each of one number.

    Returns:
        The run, and how many ranks each stretch of its steps had.

    Raises:
        AssertionError: where a result differs in one bit.
    """
    ended = carry_out(plan, folder / "run", spares=0, transport=transport, options=options)
    whole: Ended | None = None
    found = stretches(folder / "run", plan.steps, 4)
    for stretch in found:
        for file in (folder / "stretches").glob("result-*.json"):
            file.unlink()
        ranks = len(stretch.streams)
        whole = carry_out(plan, folder / "stretches", ranks=ranks, spares=0, transport=transport, stretch=stretch)
    assert whole is not None
    for expected, own in zip(whole.results, ended.results, strict=True):
        different = differences(expected, own)
        assert not different, f"{plan}: rank {own['rank']} of {own['ranks']} differs: {different}; {found}"
    return ended, [len(stretch.streams) for stretch in found]


def resizes(losses: int, transport: str, seed: int) -> None:
    """The kill test, where fewer ranks go on and processes come back when they are ready."""
    total: Counter[str] = Counter()
    number = shrunk = grown = 0
    while sum(total.values()) < losses:
        case = RESIZED[number % len(RESIZED)]
        plan = Plan(steps=40, every=5, seed=seed + number, last_loss=30, ranks=4, pause=0.3, **case)  # type: ignore[arg-type]
        options = ("--min-ranks", "2", "--rejoin", "0.2")
        with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
            ended, sizes = compare_in_stretches(plan, Path(folder), transport, options)
        total += Counter(str(loss["kind"]) for loss in ended.losses.values())
        shrunk += sum(after < before for before, after in pairwise(sizes))
        grown += sum(after > before for before, after in pairwise(sizes))
        number += 1
        print(f"{case}: {len(ended.losses)} losses; ranks {' '.join(map(str, sizes))}", flush=True)
    print(
        f"{sum(total.values())} losses ({dict(total)}); {shrunk} times fewer ranks went on and {grown} times more; all "
        f"results equal bit for bit to those of plain loops from checkpoint to checkpoint"
    )


@dataclass(frozen=True)
class Tally:
    """What came of the losses of one plan."""

    losses: Counter[str]
    repairs: int
    restarts: int
    seconds: list[float]
    most_files: int
    most_threads: int


def compare(
    plan: Plan,
    folder: Path,
    *,
    transport: str,
    heartbeat: float = 0.0,
    whole: list[dict[str, object]] | None = None,
) -> Tally:
    """Hold a run with losses against one without.

    Args:
        whole: results of the run without, where they are known.

    Raises:
        AssertionError: where a result differs in one bit.
    """
    if whole is None:
        whole = carry_out(replace(plan, every=0), folder / "whole", transport=transport).results
    lossy = carry_out(plan, folder / "lossy", transport=transport, heartbeat=heartbeat)
    for expected, found in zip(whole, lossy.results, strict=True):
        different = {key: (expected[key], found[key]) for key in expected if expected[key] != found[key]}
        assert not different, f"{plan}: rank {expected['rank']} differs: {different}"
    kinds = Counter(str(loss["kind"]) for loss in lossy.losses.values())
    restarts = lossy.output.count("begin again")
    most_files, most_threads = (max(one[name] for one in lossy.resources) for name in ("files", "threads"))
    return Tally(kinds, len(lossy.repairs), restarts, seconds_lost(lossy), most_files, most_threads)


def seconds_lost(ended: Ended) -> list[float]:
    """From each loss until the first step after it was made on all ranks that had a part in it."""
    found = []
    for name, loss in ended.losses.items():
        at = float(loss["time"])  # type: ignore[arg-type]
        if name.startswith("lost"):
            after = [r["stepped"] for r in ended.repairs if r["settled"] > at]
            first = min((r["settled"] for r in ended.repairs if r["settled"] > at), default=None)
            if after and first is not None:
                found.append(max(r["stepped"] for r in ended.repairs if abs(r["settled"] - first) < 0.2) - at)
    return found


CASES = [
    {"stage": 3, "scaler": True},
    {"stage": 2, "accumulate": 2},
    {"stage": 1, "accumulate": 2},
    {"stage": 3, "copies": 2},
    {"stage": 0},
    {"stage": 3, "save_every": 7},
]
"""What the kill test shards, in turn."""

RESIZED = [
    {"stage": 3, "scaler": True},
    {"stage": 2, "accumulate": 2},
    {"stage": 1, "global_batch": 12},
    {"stage": 0, "global_batch": 12},
]
"""Likewise, where the number of ranks changes."""


def kills(losses: int, transport: str, seed: int) -> None:
    """The kill test."""
    total: Counter[str] = Counter()
    repairs = restarts = number = 0
    seconds: list[float] = []
    every = 6
    while sum(total.values()) < losses:
        case = CASES[number % len(CASES)]
        # A stopped rank costs the limit of the heartbeat: some of them in one case of six.
        kinds = ("kill", "raise", "exit", "stop") if number % 6 == 5 else ("kill", "raise", "exit")
        left = losses - sum(total.values())
        steps = every * min(16, max(2, left))
        with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
            plan = Plan(steps=steps, every=every, seed=seed + number, kinds=kinds, **case)  # type: ignore[arg-type]
            heartbeat = 1.5 if "stop" in kinds else 0.0
            tally = compare(plan, Path(folder) / "case", transport=transport, heartbeat=heartbeat)
        total += tally.losses
        repairs += tally.repairs
        restarts += tally.restarts
        seconds += tally.seconds
        number += 1
        print(
            f"{case}: {sum(tally.losses.values())} losses, {tally.restarts} restarts from a checkpoint, median "
            f"{statistics.median(tally.seconds or [0]):.3f} s, worst {max(tally.seconds or [0]):.3f} s; at most "
            f"{tally.most_files} open files and {tally.most_threads} threads",
            flush=True,
        )
    print(f"{sum(total.values())} losses ({dict(total)}), {restarts} restarts; all results equal bit for bit")


def parts_of(ended: Ended) -> list[dict[str, float]]:
    """Of each loss: seconds until it was noticed, ranks had met, had their slices, and had made the step."""
    found = []
    for name, loss in sorted(ended.losses.items()):
        at = float(loss["time"])  # type: ignore[arg-type]
        after = [repair for repair in ended.repairs if repair["began"] > at]
        if not name.startswith("lost") or not after:
            continue
        first = min(repair["settled"] for repair in after)
        own = [repair for repair in after if abs(repair["settled"] - first) < 0.2]
        times = [at, *(max(repair[key] for repair in own) for key in ("began", "met", "settled", "stepped"))]
        names = ("noticed", "met", "states moved", "step redone")
        parts = {part: end - start for part, (start, end) in zip(names, pairwise(times), strict=True)}
        found.append(parts | {"in all": times[-1] - times[0], "number": own[0]["number"]})
    return found


def times(models: Sequence[str], losses: int, spares: int, kinds: tuple[str, ...], transport: str) -> list[object]:
    """From a loss to the first step after it. Returns what was measured, a row for each model."""
    rows: list[object] = []
    for model in models:
        # Some two seconds, in which the next spare gets ready.
        every = 150 if model == "small" else 3
        plan = Plan(steps=every * losses, every=every, model=model, kinds=kinds, again=0.0, seed=11)
        with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
            heartbeat = 0.6 if "stop" in kinds else 0.0
            ended = carry_out(plan, Path(folder) / "run", spares=spares, transport=transport, heartbeat=heartbeat)
        found = parts_of(ended)
        print(f"{model}, {len(found)} losses ({', '.join(kinds)}), {spares} spares: seconds, median and worst")
        for part in (name for name in found[0] if name != "number"):
            values = [one[part] for one in found]
            print(f"  {part:<14}{statistics.median(values):8.3f}{max(values):8.3f}", flush=True)
        rows.append(
            {
                "model": model,
                "ranks": RANKS,
                "spares": spares,
                "kinds": list(kinds),
                "transport": transport,
                "parameters": ended.resources[0]["padded"],
                "losses": [{part: round(seconds, 4) for part, seconds in one.items()} for one in found],
            }
        )
    return rows


def resize(model: str, losses: int, transport: str) -> None:
    """Until fewer ranks go on after a loss; and until more do, once a process is ready to join them."""
    every = 6
    plan = Plan(
        steps=every * losses + every, every=every, model=model, kinds=("kill",), again=0.0, seed=13, ranks=4, pause=0.5
    )
    options = ("--min-ranks", "3", "--rejoin", "0")
    with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
        ended = carry_out(plan, Path(folder) / "run", spares=0, transport=transport, options=options)
    fewer = [part for part in parts_of(ended) if part["number"] == 3]
    more = joins_of(ended)
    for what, found in (("fewer ranks", fewer), ("more ranks", more)):
        print(f"{model}, {len(found)} times {what}: seconds, median and worst")
        for part in (name for name in found[0] if name != "number"):
            values = [one[part] for one in found]
            print(f"  {part:<14}{statistics.median(values):8.3f}{max(values):8.3f}")


def joins_of(ended: Ended) -> list[dict[str, float]]:
    """Of each time that a process joined: seconds from the top of a step until that step was made by more ranks."""
    joins = sorted((r for r in ended.repairs if not r["ranks"] and r["joined"]), key=lambda r: r["settled"])
    found = []
    while joins:
        own = [repair for repair in joins if repair["settled"] - joins[0]["settled"] < 0.2]
        joins = joins[len(own) :]
        # The one that joins has begun to wait long before.
        times = [max(repair[key] for repair in own) for key in ("began", "met", "settled", "stepped")]
        names = ("met", "cut anew", "step made")
        parts = {part: end - start for part, (start, end) in zip(names, pairwise(times), strict=True)}
        found.append(parts | {"in all": times[-1] - times[0]})
    return found


def price(model: str, ranks: int, steps: int) -> None:
    """A step with a mirror, or two copies, beside one without; in turn, three times."""
    cases = {"none": {"mirror": False}, "mirror": {"mirror": True}}
    if ranks % 2 == 0 and ranks > 2:
        cases["2 copies"] = {"copies": 2}  # type: ignore[dict-item]
    taken: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
        for repeat in range(3):
            for name, options in cases.items():
                plan = Plan(steps=steps, model=model, **options)  # type: ignore[arg-type]
                ended = carry_out(plan, Path(folder) / f"{name}-{repeat}", ranks=ranks, spares=0)
                taken[name].append(max(one["step"] for one in ended.resources))
                if repeat == 0:
                    one = ended.resources[0]
                    print(
                        f"{name}: mirror holds {one['mirror']:,} bytes, sends {one['sent']:,} a step; formulas "
                        f"{12 * one['padded'] // ranks:,} and {4 * one['padded'] // ranks:,}"
                    )
    for name, seconds in taken.items():
        print(f"{name:<10}{min(seconds):8.3f} s a step, {min(seconds) / min(taken['none']) - 1:+.1%}")


def throughput(model: str, steps: int, every: int) -> None:
    """How much of its throughput a run keeps that loses a rank every so many steps."""
    with tempfile.TemporaryDirectory(prefix="onecopy-recovery-") as folder:
        plan = Plan(steps=steps, model=model, again=0.0, seed=5)
        whole = carry_out(plan, Path(folder) / "whole")
        lossy = carry_out(replace(plan, every=every), Path(folder) / "lossy")
    step = max(one["step"] for one in whole.resources)
    lost = sum(seconds_lost(lossy)) - step * len(lossy.losses) / 2
    kept = steps * step / (steps * step + lost)
    restart = statistics.mean(part["in all"] - part["step redone"] for part in parts_of(lossy))
    expected = lost_seconds_with_copies(len(lossy.losses), restart=restart, step=step / 2)
    print(
        f"{len(lossy.losses)} losses in {steps} steps of {step:.3f} s: {kept:.1%} of the throughput kept; by the "
        f"planner's formula {steps * step / (steps * step + expected):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    killing = commands.add_parser("kills")
    killing.add_argument("--losses", type=int, default=1000)
    killing.add_argument("--transport", choices=("memory", "sockets"), default="memory")
    killing.add_argument("--seed", type=int, default=0)
    killing.add_argument("--resize", action="store_true", help="without spares: fewer ranks go on, and more again")
    timing = commands.add_parser("times")
    timing.add_argument("--losses", type=int, default=20)
    timing.add_argument("--spares", type=int, default=2)
    timing.add_argument("--kinds", nargs="+", default=["kill"])
    timing.add_argument("--transport", choices=("memory", "sockets"), default="memory")
    resizing = commands.add_parser("resize")
    resizing.add_argument("--losses", type=int, default=10)
    resizing.add_argument("--transport", choices=("memory", "sockets"), default="memory")
    pricing = commands.add_parser("price")
    pricing.add_argument("--ranks", type=int, default=4)
    losing = commands.add_parser("throughput")
    losing.add_argument("--every", type=int, default=20)
    timing.add_argument("--model", nargs="+", default=["30m"])
    timing.add_argument("--json", type=Path, help="write what was measured to this file")
    for command, steps in ((resizing, 0), (pricing, 12), (losing, 100)):
        command.add_argument("--model", default="30m")
        if steps:
            command.add_argument("--steps", type=int, default=steps)
    options = parser.parse_args()
    if options.command == "kills" and options.resize:
        resizes(options.losses, options.transport, options.seed)
    elif options.command == "resize":
        resize(options.model, options.losses, options.transport)
    elif options.command == "kills":
        kills(options.losses, options.transport, options.seed)
    elif options.command == "times":
        rows = times(options.model, options.losses, options.spares, tuple(options.kinds), options.transport)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    elif options.command == "price":
        price(options.model, options.ranks, options.steps)
    else:
        throughput(options.model, options.steps, options.every)


if __name__ == "__main__":
    main()
