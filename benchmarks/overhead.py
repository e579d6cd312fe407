"""The engine's own time: what onecopy's Python adds to a step, per unit, on torch's fake process group.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --layers 100 --ranks 64 --stages 3 --profile
    python benchmarks/overhead.py --units auto

Two copies of one net of many narrow layers take steps in turn: one plain, one sharded over N ranks
that do not exist (`fake.py`). Nothing is sent and the arithmetic is the same, so the difference is the engine, and what
the fake group's collectives cost, which are timed alone in the same rounds and taken off. Seconds are the
processor's for this process, so that what else the machine does counts little. Medians over rounds:

    engine = step of the sharded net - step of the plain net - its collectives alone

It should not depend on N, and grow with the number of layers only: the two tables that are printed. Each layer is a
unit; with `--units auto`, as by default, layers as narrow as these are the root's.

`--group silent` takes a group whose collectives cost next to nothing at any N, which is the fairer look at many ranks.
`--systems fully_shard` measures torch's own fully_shard in the same way, as stage 3. Its collectives are taken to be
as many and as large as onecopy's, which is so for few ranks (it pads each parameter, not each unit).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import onecopy
from harness.fake import PHASES, Replay, fake_group
from trained.nets import HIDDEN, Narrow

TARGET: Final = 150.0
"""Microseconds per unit and step."""


@dataclass(frozen=True)
class Case:
    kind: str
    layers: int
    ranks: int
    stage: int
    system: str = "onecopy"
    units: str = "each"


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step of one case, by phase."""

    case: Case
    plain: dict[str, float]
    sharded: dict[str, float]
    collectives: dict[str, float]

    def engine(self, *phases: str) -> float:
        """Microseconds of the engine per unit, in the given phases; in the whole step if none is given."""
        chosen = phases or PHASES
        seconds = sum(self.sharded[phase] - self.plain[phase] - self.collectives[phase] for phase in chosen)
        return 1e6 * seconds / self.case.layers

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "engine_microseconds_per_unit": self.engine()}


class Stepper:
    """Takes steps of one net and returns the seconds of each phase."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(1, 4, HIDDEN)

    def __call__(self) -> dict[str, float]:
        start = process_time()
        loss = self.model(self._batch)
        forward = process_time()
        loss.backward()
        backward = process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = process_time()
        return dict(zip(PHASES, (forward - start, backward - forward, end - backward), strict=True))


def measure(case: Case, rounds: int, warmup: int = 3, profile: bool = False, group: str = "fake") -> Measured:
    """Interleaved steps of one case on a group of its own."""
    with fake_group(case.ranks, group):
        plain = Stepper(Narrow(case.kind, case.layers))
        narrow = Narrow(case.kind, case.layers)
        model = onecopy.shard(narrow, case.stage, units=list(narrow.blocks) if case.units == "each" else "auto")
        sharded = Stepper(model)
        for _ in range(warmup):
            sharded()
        last = onecopy.ledger(model).last_step
        assert last is not None
        if case.system == "fully_shard":
            sharded = Stepper(_fully_shard(Narrow(case.kind, case.layers)))
        for _ in range(warmup):
            plain()
            sharded()
        collectives = _timed(Replay(last.entries, case.ranks))
        if profile:
            _profile(sharded, steps=10)
        contestants: list[Callable[[], dict[str, float]]] = [plain, sharded, collectives]
        taken: list[list[dict[str, float]]] = [[], [], []]
        for number in range(rounds):
            for turn in range(len(contestants)):
                position = (number + turn) % len(contestants)
                taken[position].append(contestants[position]())
        found = [{phase: statistics.median(one[phase] for one in steps) for phase in PHASES} for steps in taken]
    del plain, sharded, model, collectives, contestants
    gc.collect()
    return Measured(case, *found)


def _fully_shard(model: Narrow) -> Narrow:
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def _timed(replay: Replay) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        seconds = {}
        for phase in PHASES:
            start = process_time()
            replay.run(phase)
            seconds[phase] = process_time() - start
        return seconds

    return run


def _profile(step: Callable[[], object], steps: int) -> None:
    """Print where ``steps`` steps spend their time, by cProfile, which makes small functions look larger."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    statistics_ = pstats.Stats(profiler).strip_dirs()
    for order in ("tottime", "cumulative"):
        statistics_.sort_stats(order).print_stats(25)


def table(found: list[Measured], columns: str) -> str:
    """Microseconds per unit and step. ``columns`` is what differs along a row: "layers" or "ranks"."""
    fixed = "ranks" if columns == "layers" else "layers"
    heads = sorted({getattr(one.case, columns) for one in found})
    rows: dict[tuple[str, str, int, int], dict[int, Measured]] = {}
    for one in found:
        key = (one.case.system, one.case.kind, one.case.stage, getattr(one.case, fixed))
        rows.setdefault(key, {})[getattr(one.case, columns)] = one
    lines = [f"| system | layer | stage | {fixed} | " + " | ".join(f"{columns} {head}" for head in heads) + " |"]
    lines.append("|---" * (4 + len(heads)) + "|")
    for (system, kind, stage, held), cells in rows.items():
        texts = [_cell(cells[head]) if head in cells else "" for head in heads]
        lines.append(f"| {system} | {kind} | {stage} | {held} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _cell(one: Measured) -> str:
    parts = " + ".join(f"{one.engine(phase):.0f}" for phase in PHASES)
    own = 1e6 * sum(one.collectives.values()) / one.case.layers
    return f"**{one.engine():.0f}** = {parts} (group {own:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--systems", nargs="+", choices=("onecopy", "fully_shard"), default=["onecopy"])
    parser.add_argument("--units", choices=("each", "auto"), default="each")
    parser.add_argument("--group", choices=("fake", "silent"), default="fake")
    parser.add_argument("--kind", nargs="+", choices=("linear", "block"), default=["linear", "block"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--passes", type=int, default=1, help="how often all cases are taken; the least counts")
    parser.add_argument("--profile", action="store_true", help="print cProfile's top lines of each case")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_ranks = [(options.layers[len(options.layers) // 2], ranks) for ranks in options.ranks]
    by_layers = [(layers, options.ranks[0]) for layers in options.layers]
    cases = [
        Case(kind, layers, ranks, stage, system, options.units)
        for system in options.systems
        for kind in options.kind
        for stage in (options.stages if system == "onecopy" else [3])
        for layers, ranks in dict.fromkeys(by_ranks + by_layers)
    ]
    # What else the machine does only adds, and for a minute at a time: cases would seem to differ.
    taken = [
        {case: measure(case, options.rounds, profile=options.profile, group=options.group) for case in cases}
        for _ in range(options.passes)
    ]
    found = {case: min((one[case] for one in taken), key=Measured.engine) for case in cases}
    print(f"Microseconds of the engine per unit and step = forward + backward + optimizer step; target {TARGET:.0f}.")
    print("In brackets, and not in the sum: the group's own collectives.\n")
    for columns, wanted in (("ranks", by_ranks), ("layers", by_layers)):
        print(table([one for case, one in found.items() if (case.layers, case.ranks) in wanted], columns) + "\n")
    if options.json:
        measured = [one.to_json() for one in found.values()]
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "group": options.group, "measured": measured}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
