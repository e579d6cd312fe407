"""Page: a plan as one HTML file: memory by category against the limit, step time over the link. No script, no network.

The drawings are SVG, made here; the style is that of `onecopy report`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from onecopy.planner.answer.advice import Advice
from onecopy.planner.answer.estimate import Estimate, Job
from onecopy.planner.answer.paste import shard_call
from onecopy.planner.answer.sweep import HURTS, Curve
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import CATEGORIES
from onecopy.planner.quantities import count, gigabytes, rate, seconds

WIDTH: Final = 1110
_BAR: Final = 26
_LEFT: Final = 490
_HEIGHT: Final = 320
_MARGIN: Final = 70
_COLOURS: Final = {"logits": "activations", "optimizer_temporaries": "optimizer"}
"""Categories that share another's colour, drawn lighter."""


class Part(NamedTuple):
    """One piece of a bar: pixels, and what it is."""

    x: float
    width: float
    category: str
    lighter: bool
    words: str


class Bar(NamedTuple):
    """One option."""

    name: str
    y: float
    parts: list[Part]
    end: float
    total: str
    fits: bool


class Line(NamedTuple):
    """One stage's step times: a path in pixels, its name (of several where they coincide), and where that stands."""

    stage: int
    path: str
    name: str
    x: float
    y: float


def render(job: Job, machine: Machine, advice: Advice, swept: Sequence[Curve], crossing: float | None) -> str:
    """The page.

    Args:
        swept: step times over the link's bandwidth.
        crossing: bytes a second below which stage 3 hurts; None if there is no such point in the sweep.
    """
    loader = ChoiceLoader([PackageLoader("onecopy.planner.answer"), PackageLoader("onecopy.report")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    first = [] if advice.best is None else [advice.best]
    shown = _one_of_each_kind([*first, *advice.estimates])
    used = [c for c in CATEGORIES if any(e.peaks[e.peak_phase].get(c) for e in shown)]
    return environment.get_template("plan.html").render(
        style=Markup(loader.get_source(environment, "style.css")[0]),
        title=job.shape.name,
        headline=f"{count(job.shape.parameters)} parameters, {job.precision}, {machine.gpus} GPUs of "
        f"{gigabytes(machine.gpu.memory)} on {machine.nodes} {'nodes' if machine.nodes > 1 else 'node'}",
        advice=advice,
        tiles=_tiles(advice),
        bars=_bars(shown, machine.gpu.memory),
        legend=[(c, _COLOURS.get(c, c), c in _COLOURS, c.replace("_", " ")) for c in used],
        limit=_LEFT + (WIDTH - _LEFT - 110) * machine.gpu.memory / _scale(shown, machine.gpu.memory),
        limit_words=gigabytes(machine.gpu.memory),
        bars_height=_BAR * len(shown) + 34,
        width=WIDTH,
        chart=_chart(swept, crossing),
        rows=[_row(found) for found in shown],
        call=shard_call(job, advice.best) if advice.best else None,
    )


def _one_of_each_kind(estimates: Sequence[Estimate]) -> list[Estimate]:
    kinds: dict[tuple[object, ...], Estimate] = {}
    for found in estimates:
        kinds.setdefault(found.option.kind, found)
    ordered = sorted(kinds.values(), key=lambda e: (not e.available, e.option.stage, e.option.offload))
    return ordered[:40]


def _tiles(advice: Advice) -> list[tuple[str, str, str]]:
    best = advice.best
    if best is None:
        return []
    return [
        ("take", f"stage {best.option.stage}", best.option.words().partition(", ")[2]),
        ("memory", gigabytes(best.peak), f"of {gigabytes(best.limit)}, in {best.peak_phase}"),
        ("step", seconds(best.seconds.total), f"{seconds(best.seconds.exposed)} of it waiting for messages"),
        ("speed", best.speed, f"limited by {best.limited_by}" if best.rate else ""),
        ("sent per step and rank", gigabytes(best.bytes_sent), _sent_remark(best)),
    ]


def _sent_remark(best: Estimate) -> str:
    if best.option.tensor == 1:
        return "model states"
    return f"model states; and {gigabytes(best.activations_sent)} of activations"


def _scale(shown: Sequence[Estimate], limit: float) -> float:
    """Bytes at the right edge. Options far above the limit are cut off there."""
    return min(3 * limit, max([limit, *(found.peak for found in shown)]) * 1.02)


def _bars(shown: Sequence[Estimate], limit: float) -> list[Bar]:
    span, full = WIDTH - _LEFT - 110, _scale(shown, limit)
    bars = []
    for place, found in enumerate(shown):
        at, parts = 0.0, []
        for category in CATEGORIES:
            size = found.peaks[found.peak_phase].get(category, 0.0)
            left, right = min(at, full), min(at + size, full)
            if right > left:
                words = f"{category.replace('_', ' ')}: {gigabytes(size)}"
                colour = _COLOURS.get(category, category)
                parts.append(
                    Part(_LEFT + left / full * span, (right - left) / full * span, colour, category in _COLOURS, words)
                )
            at += size
        name = found.option.words() + ("" if found.available else " *")
        end = _LEFT + min(at, full) / full * span
        bars.append(Bar(name, 8 + place * _BAR, parts, end, gigabytes(found.peak), found.fits))
    return bars


def _chart(swept: Sequence[Curve], crossing: float | None) -> dict[str, Any]:
    """Step times on logarithmic axes."""
    bandwidths = [bandwidth for bandwidth, _ in swept[0].points]
    times = [time for curve in swept for _, time in curve.points]
    low, high = math.log10(min(times)), math.log10(max(times))
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    first, last = math.log10(bandwidths[0]), math.log10(bandwidths[-1])

    def x(bandwidth: float) -> float:
        return _MARGIN + (math.log10(bandwidth) - first) / (last - first) * (WIDTH - 2 * _MARGIN)

    def y(time: float) -> float:
        return 12 + (high - math.log10(time)) / (high - low) * (_HEIGHT - 50)

    lines: list[Line] = []
    for curve in swept:
        points = [(x(bandwidth), y(time)) for bandwidth, time in curve.points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        name, height = f"stage {curve.stage}", points[0][1] + 4
        if lines and abs(lines[-1].y - height) < 12:
            name, lines[-1] = f"{lines[-1].name}, {curve.stage}", lines[-1]._replace(name="")
        lines.append(Line(curve.stage, path, name, points[0][0] - 6, height))
    marks = [bandwidths[round(i * (len(bandwidths) - 1) / 4)] for i in range(5)]
    heights = [10 ** (low + (high - low) * i / 4) for i in range(5)]
    crossed = None if crossing is None else (x(crossing), rate(crossing))
    return {
        "lines": lines,
        "height": _HEIGHT,
        "bottom": _HEIGHT - 38,
        "x": [(x(mark), rate(mark)) for mark in marks],
        "y": [(y(height), seconds(height)) for height in heights],
        "crossed": crossed,
        "hurts": swept[3].points[-1][1] > HURTS * swept[2].points[-1][1],
    }


def _row(found: Estimate) -> list[str]:
    return [
        found.option.words() + ("" if found.available else " *"),
        gigabytes(found.peak),
        "yes" if found.fits else "no",
        gigabytes(found.host),
        gigabytes(found.bytes_sent),
        seconds(found.seconds.total),
        seconds(found.seconds.exposed),
        found.speed,
        found.limited_by,
    ]
