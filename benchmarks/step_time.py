"""Step time of onecopy's stages beside DDP and fully_shard on one GPT: the short way to a part of `compare.py`.

python benchmarks/step_time.py --ranks 2 --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Final

from harness.contest import Contest, hold
from harness.systems import SYSTEMS
from harness.work import Work
from trained.cases import SHAPES

NAMES: Final = {
    "ddp": "DDP",
    "fully_shard": "fully_shard, reshard_after_forward=True",
    **{f"stage {stage}": f"onecopy stage {stage}" for stage in range(4)},
}
"""What systems are called here."""


def table(contest: Contest, names: list[str]) -> str:
    """Median seconds, and the median and quartiles of each system's step time over a peer's, step by step."""
    peers = [name for name in ("ddp", "fully_shard") if name in names]
    lines = [f"{'':<14}{'median s':>10}" + "".join(f"{'/ ' + peer + ' (quartiles)':>34}" for peer in peers)]
    for name in names:
        line = f"{name:<14}{statistics.median(contest.timed[NAMES[name]].seconds):>10.3f}"
        for peer in peers:
            middle, low, high = contest.ratio(NAMES[name], NAMES[peer])
            line += f"{middle:>18.3f} ({low:.3f} - {high:.3f})"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each system")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--batch", type=int, default=2, help="samples a rank in a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, help="file for the raw times")
    options = parser.parse_args()
    names = options.only or list(NAMES)
    work = Work(
        f"gpt-{options.model}",
        precision="fp32",
        micro_batches=options.accumulate,
        ranks=options.ranks,
        samples=options.batch,
        size=options.length,
        steps=options.steps,
        warmup=options.warmup,
        threads=max(1, (os.cpu_count() or 1) // options.ranks),
    )
    systems = {NAMES[name]: SYSTEMS[NAMES[name]] for name in names}
    contest = hold(work, systems, weigh=False, network=False, limit=options.limit / 4)
    differing = {name: timed.deviation for name, timed in contest.timed.items() if name not in contest.agreeing}
    assert not differing, f"losses differ from the first system's by these shares: {differing}"
    if options.json:
        options.json.write_text(json.dumps(asdict(contest), indent=1) + "\n")
    print(table(contest, names))


if __name__ == "__main__":
    main()
