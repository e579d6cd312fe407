"""Timelines: one step of a small GPT on two ranks at each stage, as `onecopy.profile` records it.

    OMP_NUM_THREADS=1 python benchmarks/timelines.py        # writes benchmarks/results/timelines.json

`benchmarks/pictures.py` draws it. Of five steps the third to fifth are recorded, and the quickest is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import onecopy
from harness.forks import run_ranks
from trained.gpt import GPT, Shape

SHAPE: Final = Shape(layers=4, hidden=256, heads=4, vocabulary=2048, positions=128)
_RESULTS: Final = Path(__file__).parent / "results" / "timelines.json"
_LANES: Final = ("compute", "gather", "reduce", "wait")


def _rank(rank: int, write: Callable[[str], None], stage: int, batch: int) -> None:
    torch.manual_seed(0)
    model = onecopy.shard(GPT(SHAPE), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(rank)
    best: dict[str, Any] = {}
    for number in range(5):
        tokens = torch.randint(SHAPE.vocabulary, (batch, SHAPE.positions + 1), generator=generator)
        with onecopy.profile(model) as seen:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = [
            {"lane": e.lane, "phase": e.phase, "start": round(1e3 * e.start, 3), "end": round(1e3 * e.end, 3)}
            for e in seen.timeline.events
            if e.lane in _LANES
        ]
        end = max(event["end"] for event in events)
        if number >= 2 and (not best or end < best["end"]):
            best = {"stage": stage, "end": end, "events": events}
    write(json.dumps(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
    parser.add_argument("--json", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    found = [json.loads(run_ranks(2, _rank, stage, arguments.batch, limit=120.0)[0][-1]) for stage in range(4)]
    arguments.json.write_text(json.dumps({"unit": "ms", "batch": arguments.batch, "stages": found}) + "\n")
    print(arguments.json)


if __name__ == "__main__":
    main()
