"""Pictures: the drawings of the README and the docs, from results that are kept here.

    python benchmarks/pictures.py            # writes docs/images/*.svg
    python benchmarks/pictures.py --check    # says which are not as the results have them, and ends with exit code 1

Nothing is measured. `retake.py`, `timelines.py` and the scripts that docs/reliability.md names take the results.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from onecopy.observe.categories import CATEGORIES
from onecopy.planner.formulas.memory import model_state_bytes
from publish.drawing import Bar, Span, bars, timelines

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs/images"
STAGES: Final = range(4)
SHARDED: Final = ("nothing sharded", "optimizer states sharded", "gradients too", "parameters too")

_OURS: Final = "accent"
_THEIRS: Final = "c-other"


def _results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8"))


def _stage(number: int) -> str:
    return f"stage {number}: {SHARDED[number]}"


def states() -> str:
    """ZeRO's Figure 1 by the planner's formulas."""
    shown = []
    for stage in STAGES:
        held = model_state_bytes(stage, 7.5e9, 64)
        parts = {
            "c-parameters_sliced": held.parameters / 1e9,
            "c-gradients_sliced": held.gradients / 1e9,
            "c-optimizer": held.optimizer / 1e9,
        }
        shown.append(Bar(_stage(stage), parts, f"{held.total / 1e9:.1f} GB"))
    legend = {
        "c-parameters_sliced": "parameters",
        "c-gradients_sliced": "gradients",
        "c-optimizer": "optimizer states",
    }
    notes = ("7.5 B parameters on 64 ranks, bf16 with AdamW", "computed: ZeRO, Figure 1")
    return bars("Model states that one rank holds", shown, notes=notes, legend=legend)


def memory() -> str:
    """What the meter counted at the highest moment of a step, by category."""
    ranks = 4
    found = {
        row["stage"]: row
        for row in _results("memory")
        if row["ranks"] == ranks and row["precision"] == "bf16" and not row["tied"]
    }
    used = [c for c in CATEGORIES if any(found[stage]["peak"].get(c, 0) > 2e6 for stage in STAGES)]
    shown = []
    for stage in STAGES:
        peak = found[stage]["peak"]
        shown.append(Bar(_stage(stage), {f"c-{c}": peak[c] / 1e6 for c in used}, f"{sum(peak.values()) / 1e6:.0f} MB"))
    legend = {f"c-{c}": c.replace("_", " ") for c in used}
    size = found[0]["parameters"] / 1e6
    notes = (
        f"GPT of {size:.1f} M parameters, {ranks} CPU ranks, bf16",
        "measured: the highest moment of a step",
    )
    return bars("Memory of one rank", shown, notes=notes, legend=legend)


_PEERS: Final = {
    "DDP": ("DDP", SHARDED[0]),
    "onecopy stage 0": ("onecopy stage 0", SHARDED[0]),
    "DDP + ZeroRedundancyOptimizer": ("ZeroRedundancyOptimizer", SHARDED[1]),
    "DeepSpeed stage 1": ("DeepSpeed stage 1", SHARDED[1]),
    "onecopy stage 1": ("onecopy stage 1", SHARDED[1]),
    "fully_shard, reshard_after_forward=False": ("fully_shard, reshard=False", SHARDED[2]),
    "DeepSpeed stage 2": ("DeepSpeed stage 2", SHARDED[2]),
    "onecopy stage 2": ("onecopy stage 2", SHARDED[2]),
    "fully_shard, reshard_after_forward=True": ("fully_shard, reshard=True", SHARDED[3]),
    "DeepSpeed stage 3": ("DeepSpeed stage 3", SHARDED[3]),
    "onecopy stage 3": ("onecopy stage 3", SHARDED[3]),
}


def _beside_peers(
    title: str, values: dict[str, float], words: str, notes: Sequence[str], floors: dict[str, float]
) -> str:
    shown = []
    for system, (name, group) in _PEERS.items():
        if system in values:
            colour = _OURS if name.startswith("onecopy") else _THEIRS
            bar = Bar(name, {colour: values[system]}, words.format(values[system]), group, floors.get(system))
            shown.append(bar)
    return bars(title, shown, notes=notes, legend={_OURS: "onecopy", _THEIRS: "others"})


def traffic() -> str:
    """Bytes by the kernel's counters, in elements for each parameter."""
    found = _results("wire")
    rows = [
        row
        for row in found["measured"]
        if (row["ranks"], row["micro_batches"], row["precision"], row["rate"]) == (2, 1, "fp32", None)
    ]
    # An element has 4 bytes; two ranks send (N - 1)/N = 1/2 of what the formulas say.
    scale = 4 * found["parameters"] / 2
    values = {row["system"]: max(row["sent"]) / scale for row in rows}
    floors = {row["system"]: row["paper"] / scale for row in rows}
    notes = (
        "elements for each parameter, times (N-1)/N",
        "measured by the kernel: GPT, 2 ranks, 1 micro-batch",
        "the mark: ZeRO, section 7",
    )
    return _beside_peers("What a rank sends in a step", values, "{:.2f}", notes, floors)


def seconds() -> str:
    """Step times of a contest, over those of DDP."""
    contest = _results("compare_gpt30m_2")["contests"][0]
    base = contest["timed"]["DDP"]["seconds"]
    # Step by step, as docs/performance.md has them: what slows the machine for a moment slows both.
    values = {
        name: statistics.median(own / other for own, other in zip(timed["seconds"], base, strict=True))
        for name, timed in contest["timed"].items()
    }
    notes = ("median, over that of DDP; less is better", "GPT of 29.5 M parameters, 2 CPU ranks, fp32")
    return _beside_peers("Time of a step", values, "{:.2f}", notes, {})


def timeline() -> str:
    """One step of the first rank at each stage."""
    found = _results("timelines")
    colours = {"forward": "l-compute-0", "backward": "l-compute-1", "step": "l-compute-2"}
    panels = {}
    for row in found["stages"]:
        lanes: dict[str, list[Span]] = {"compute": [], "gather": [], "reduce": [], "wait": []}
        for event in row["events"]:
            lane = event["lane"]
            colour = colours.get(event["phase"], "l-compute-0") if lane == "compute" else f"l-{lane}"
            span = Span(
                _COLOURS.get(colour, colour), 100 * event["start"] / row["end"], 100 * event["end"] / row["end"]
            )
            lanes[lane].append(span)
        panels[_stage(row["stage"])] = lanes
    legend = {
        "l-compute-0": "forward",
        "l-compute-1": "backward",
        "l-compute-2": "optimizer",
        _COLOURS["l-gather"]: "gather parameters",
        _COLOURS["l-reduce"]: "reduce gradients",
        "l-wait": "waiting",
    }
    notes = ("small GPT on 2 CPU ranks, the first rank's", "by onecopy.profile; each step fills its panel")
    return timelines("One step", panels, end=100, unit="%", notes=notes, legend=legend)


_COLOURS: Final = {"l-gather": "accent", "l-reduce": "c-gradients_sliced"}
"""Lanes that share another's colour."""


def reliability() -> str:
    """Counts of the scripts in tests/crash, which docs/reliability.md has too."""
    shown = [
        Bar(
            row["what"],
            {_OURS: row["count"] - row["lost"], "l-wait": row["lost"]},
            f"{row['count']:,}, {row['lost']} lost",
        )
        for row in _results("reliability")
    ]
    return bars(
        "Checkpoints under kills and power cuts", shown, notes=("each a trial; what was saved is loaded again",)
    )


_PARTS: Final = {
    "noticed": ("l-wait", "noticed"),
    "met": ("c-activations", "met anew"),
    "states moved": ("accent", "states moved"),
    "step redone": ("l-compute-1", "step made again"),
}


def recovery() -> str:
    """From a kill to the first step after it: the loss in the middle, and the one that took longest."""
    shown = []
    for row in _results("recovery_times"):
        losses = sorted(row["losses"], key=lambda loss: loss["in all"])
        size = row["parameters"]
        words = f"{size / 1e6:.1f} M parameters" if size >= 1e6 else f"{size:,} parameters"
        for name, loss in (("the loss in the middle", losses[len(losses) // 2]), ("the longest", losses[-1])):
            parts = {colour: loss[part] for part, (colour, _) in _PARTS.items()}
            shown.append(Bar(name, parts, f"{loss['in all']:.2f} s", words))
    row = _results("recovery_times")[0]
    notes = (
        f"{row['ranks']} CPU ranks, a warm spare, {len(row['losses'])} kills each",
        "measured: benchmarks/recovery.py times",
    )
    return bars("From a kill to the next step made", shown, notes=notes, legend=dict(_PARTS.values()))


PICTURES: Final = {
    "states.svg": states,
    "memory.svg": memory,
    "traffic.svg": traffic,
    "step-time.svg": seconds,
    "timeline.svg": timeline,
    "reliability.svg": reliability,
    "recovery.svg": recovery,
}


def main(arguments: Sequence[str]) -> int:
    """Draw them, or compare them; the exit code."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    stale = 0
    for name, draw in PICTURES.items():
        file, drawn = IMAGES / name, draw()
        if file.exists() and file.read_text(encoding="utf-8") == drawn:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"docs/images/{name} is not as the results have it: run python benchmarks/pictures.py")
        else:
            file.write_text(drawn, encoding="utf-8")
            print(f"docs/images/{name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
