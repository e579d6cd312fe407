"""Memory, traffic and overhead of a rank for N = 8 … 4096, beside the paper's curves, as one self-contained HTML page.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json --html benchmarks/results/scaling.html

The real engine runs on torch's fake process group (`fake.py`), as rank 0 of N: its meter and its ledger count bytes,
and nothing is sent. Curves are ZeRO §5 and §7 for bf16 with K = 12. What takes a point off its curve:

- gradients are accumulated in fp32 (stage 0 holds 18Ψ, not 16Ψ), and leave before the optimizer steps (stage 1 holds
  what stage 2 does);
- the peak has units that are whole while they compute, with their gradients: a constant, which shows at large N;
- padding, once a unit has few elements for each of N slices.
"""

from __future__ import annotations

import argparse
import gc
import html
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from typing import Final

import torch

import onecopy
import overhead
from cases import CASES, count
from fake import fake_group
from onecopy.planner.memory import model_state_bytes
from onecopy.planner.traffic import step_elements

STAGES: Final = (0, 1, 2, 3)
_MIB: Final = 2**20
_BF16: Final = 2


@dataclass(frozen=True)
class Point:
    """One stage at one N, in bytes of one rank.

    Attributes:
        held: model states when the optimizer is about to step.
        peak: the meter's highest sum in a step; without activations.
        sent: of model states in a step.
        padded: elements of a gather of the whole model, over its parameters.
        overhead: microseconds of the engine per unit and step, with narrow layers.
    """

    stage: int
    ranks: int
    held: int
    peak: int
    sent: int
    padded: float
    overhead: float


def measure(name: str, stage: int, ranks: int, layers: int, rounds: int) -> Point:
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    with fake_group(ranks):
        model = onecopy.shard(case.build(), stage, precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        meter, ledger = onecopy.meter(model), onecopy.ledger(model)
        held = 0
        for _ in range(2):
            meter.reset_peaks()
            # Few tokens, for CPUs that are slow in bf16; bytes of model states do not depend on them.
            model(*case.draw(generator, 1, 4)).backward()
            held = meter.total - meter.live["communication"]
            optimizer.step()
            optimizer.zero_grad()
        last = ledger.last_step
        assert last is not None
        found = (held, sum(meter.peak.values()), last.state_bytes, onecopy.padded_numel(model) / count(case)[0])
    del model, optimizer
    gc.collect()
    own = overhead.measure(overhead.Case("linear", layers, ranks, stage), rounds).engine() if layers else 0.0
    return Point(stage, ranks, *found, overhead=own)


# --- the page


@dataclass(frozen=True)
class Chart:
    """Lines (formula) and dots (measured) by stage over N, both axes logarithmic."""

    title: str
    unit: str
    curves: dict[int, list[tuple[int, float]]]
    dots: dict[int, list[tuple[int, float]]]


def charts(points: list[Point], parameters: int) -> list[Chart]:
    sizes = sorted({point.ranks for point in points})

    def curve(formula: Callable[[int, int], float]) -> dict[int, list[tuple[int, float]]]:
        return {stage: [(n, formula(stage, n)) for n in sizes] for stage in STAGES}

    def dots(value: Callable[[Point], float]) -> dict[int, list[tuple[int, float]]]:
        return {stage: [(p.ranks, value(p)) for p in points if p.stage == stage] for stage in STAGES}

    states = curve(lambda stage, n: model_state_bytes(stage, parameters, n).total / _MIB)
    sent = curve(lambda stage, n: step_elements(stage, parameters, n).total * _BF16 / _MIB)
    found = [
        Chart("Model states held at the optimizer's step", "MiB", states, dots(lambda p: p.held / _MIB)),
        Chart("Peak of the meter in a step", "MiB", states, dots(lambda p: p.peak / _MIB)),
        Chart("Sent in a step", "MiB", sent, dots(lambda p: p.sent / _MIB)),
    ]
    if any(point.overhead for point in points):
        target = {-1: [(n, overhead.TARGET) for n in sizes]}
        found.append(Chart("Engine per unit and step (line: target)", "µs", target, dots(lambda p: p.overhead)))
    return found


_COLOURS: Final = {-1: "#888", 0: "#555", 1: "#c60", 2: "#07a", 3: "#283"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 440, 300, 60, 40, 30


def svg(chart: Chart) -> str:
    """The chart as an SVG element."""
    everything = [pair for series in (*chart.curves.values(), *chart.dots.values()) for pair in series if pair[1] > 0]
    low_x, high_x = log10(min(x for x, _ in everything)), log10(max(x for x, _ in everything))
    low_y, high_y = log10(min(y for _, y in everything)) - 0.1, log10(max(y for _, y in everything)) + 0.1

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - low_x) / ((high_x - low_x) or 1.0)
        up = (log10(y) - low_y) / (high_y - low_y)
        return _LEFT + across * (_WIDTH - _LEFT - 15), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="{_LEFT}" y="18" class="title">{html.escape(chart.title)}, {chart.unit}</text>']
    for x in sorted({x for x, _ in everything}):
        across, _ = place(x, 10**low_y)
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{x}</text>')
    for y in (step * 10.0**power for power in range(-3, 7) for step in (1, 2, 5)):
        if low_y <= log10(y) <= high_y:
            _, up = place(10**low_x, y)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 15}" y1="{up:.1f}" y2="{up:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{y:g}</text>')
    for stage, pairs in chart.curves.items():
        places = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in pairs)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{_COLOURS[stage]}" stroke-width="1.5"/>')
    for stage, pairs in chart.dots.items():
        for x, y in pairs:
            if y > 0:
                across, up = place(x, y)
                label = f"stage {stage}, N = {x}: {y:.4g} {chart.unit}"
                parts.append(
                    f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{_COLOURS[stage]}" fill-opacity="0.7">'
                    f"<title>{label}</title></circle>"
                )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">N, ranks</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}">{"".join(parts)}</svg>'


def page(points: list[Point], parameters: int, name: str) -> str:
    """The whole page."""
    legend = " ".join(f'<b style="color:{_COLOURS[stage]}">● stage {stage}</b>' for stage in STAGES)
    style = "body{font:14px sans-serif;max-width:920px;margin:2em auto}svg text{font-size:11px}.title{font-weight:bold}"
    words = (
        f"{name}, {parameters:,} parameters, bf16 with fp32 masters and AdamW (K = 12), one micro-batch. Lines: ZeRO "
        f"§5 and §7. Dots: the engine on torch's fake process group, rank 0, by its own meter and ledger."
    )
    drawn = "".join(svg(chart) for chart in charts(points, parameters))
    return (
        f'<!doctype html><meta charset="utf-8"><title>Scaling on paper and by simulation</title><style>{style}</style>'
        f"<h1>Scaling on paper and by simulation</h1><p>{html.escape(words)}</p><p>{legend}</p>{drawn}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="gpt-3m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 1024, 4096])
    parser.add_argument("--layers", type=int, default=50, help="of the net for overhead; 0 leaves overhead out")
    parser.add_argument("--rounds", type=int, default=5, help="steps of it")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--html", type=Path, help="file for the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parameters = count(CASES[options.case])[0]
    points = [
        measure(options.case, stage, ranks, options.layers, options.rounds)
        for ranks in options.ranks
        for stage in STAGES
    ]
    print("| N | stage | held MiB | / formula | peak MiB | sent MiB | / formula | padded | µs per unit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for p in points:
        states = model_state_bytes(p.stage, parameters, p.ranks).total
        paper = step_elements(p.stage, parameters, p.ranks).total * _BF16
        print(
            f"| {p.ranks} | {p.stage} | {p.held / _MIB:.2f} | {p.held / states:.3f} | {p.peak / _MIB:.2f} "
            f"| {p.sent / _MIB:.2f} | {p.sent / paper:.3f} | {p.padded:.3f} | {p.overhead:.0f} |"
        )
    if options.json:
        content = {"case": options.case, "parameters": parameters, "points": [asdict(point) for point in points]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.html:
        options.html.write_text(page(points, parameters, options.case))


if __name__ == "__main__":
    main()
