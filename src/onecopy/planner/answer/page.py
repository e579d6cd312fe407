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
from onecopy.planner.answer.errors import Errors, errors, share
from onecopy.planner.answer.estimate import Estimate, Job
from onecopy.planner.answer.paste import shard_call
from onecopy.planner.answer.sweep import HURTS, Curve
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import CATEGORIES
from onecopy.planner.quantities import count, gigabytes, rate, seconds

WIDE: Final = 1110
NARROW: Final = 360
"""Pixels of the drawing of step times: on a screen, and on a telephone."""

_HEIGHT: Final = 320
_LEFT: Final = 104
_RIGHT: Final = 70
_SHOWN: Final = 16
"""Kinds of options."""

_COLOURS: Final = {"logits": "activations", "optimizer_temporaries": "optimizer"}
"""Categories that share another's colour, drawn lighter."""


class Part(NamedTuple):
    """One piece of a bar: per cent of the width, and what it is."""

    width: float
    category: str
    lighter: bool
    words: str


class Bar(NamedTuple):
    """One option; ``low`` and ``high`` are where nine runs in ten end, in per cent, None where none were compared."""

    name: str
    parts: list[Part]
    total: str
    fits: bool
    low: float | None
    high: float | None


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
    wrong = errors(machine, job.shape)
    used = [c for c in CATEGORIES if any(e.peaks[e.peak_phase].get(c) for e in shown)]
    return environment.get_template("plan.html").render(
        style=Markup(loader.get_source(environment, "style.css")[0]),
        title=job.shape.name,
        headline=f"{count(job.shape.parameters)} parameters, {job.precision}, {machine.gpus} GPUs of "
        f"{gigabytes(machine.gpu.memory)} on {machine.nodes} {'nodes' if machine.nodes > 1 else 'node'}",
        advice=advice,
        tiles=_tiles(advice, wrong),
        bars=_bars(shown, machine.gpu.memory, wrong.memory),
        legend=[(c, _COLOURS.get(c, c), c in _COLOURS, c.replace("_", " ")) for c in used],
        limit=100 * machine.gpu.memory / _scale(shown, machine.gpu.memory),
        limit_words=gigabytes(machine.gpu.memory),
        link=f"the link {'between nodes' if machine.nodes > 1 else 'within the node'}",
        charts=[("wide", _chart(swept, crossing, WIDE, 5)), ("narrow", _chart(swept, crossing, NARROW, 3))],
        columns=_columns(wrong),
        rows=[_row(found) for found in shown],
        call=shard_call(job, advice.best) if advice.best else None,
    )


def _one_of_each_kind(estimates: Sequence[Estimate]) -> list[Estimate]:
    kinds: dict[tuple[object, ...], Estimate] = {}
    for found in estimates:
        kinds.setdefault(found.option.kind, found)
    # The best first: what exists, fits and is fast. Then by stage, as people look for them.
    chosen = list(kinds.values())[:_SHOWN]
    return sorted(chosen, key=lambda e: (not e.available, e.option.stage, e.option.offload, e.option.checkpointing))


def _tiles(advice: Advice, wrong: Errors) -> list[tuple[str, str, str]]:
    best = advice.best
    if best is None:
        return []
    return [
        ("take", f"stage {best.option.stage}", best.option.words().partition(", ")[2]),
        ("memory", gigabytes(best.peak) + share(wrong.memory), f"of {gigabytes(best.limit)}, in {best.peak_phase}"),
        (
            "step",
            seconds(best.seconds.total) + share(wrong.time) if best.rate else "unknown",
            f"{seconds(best.seconds.exposed)} of it waiting for messages",
        ),
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


def _bars(shown: Sequence[Estimate], limit: float, wrong: float | None) -> list[Bar]:
    full = _scale(shown, limit)
    bars = []
    for found in shown:
        at, parts = 0.0, []
        for category in CATEGORIES:
            size = found.peaks[found.peak_phase].get(category, 0.0)
            left, right = min(at, full), min(at + size, full)
            if right > left:
                words = f"{category.replace('_', ' ')}: {gigabytes(size)}"
                colour = _COLOURS.get(category, category)
                parts.append(Part(100 * (right - left) / full, colour, category in _COLOURS, words))
            at += size
        low, high = (None, None) if wrong is None else (min(100 * at * (1 + by) / full, 100) for by in (-wrong, wrong))
        bars.append(Bar(_name(found), parts, gigabytes(found.peak), found.fits, low, high))
    return bars


def _name(found: Estimate) -> str:
    return found.option.words() + ("" if found.available else " *")


def _chart(swept: Sequence[Curve], crossing: float | None, width: int, marked: int) -> dict[str, Any]:
    """Step times on logarithmic axes."""
    bandwidths = [bandwidth for bandwidth, _ in swept[0].points]
    times = [time for curve in swept for _, time in curve.points]
    low, high = math.log10(min(times)), math.log10(max(times))
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    first, last = math.log10(bandwidths[0]), math.log10(bandwidths[-1])

    def x(bandwidth: float) -> float:
        return _LEFT + (math.log10(bandwidth) - first) / (last - first) * (width - _LEFT - _RIGHT)

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
    marks = [bandwidths[round(i * (len(bandwidths) - 1) / (marked - 1))] for i in range(marked)]
    heights = [10 ** (low + (high - low) * i / 4) for i in range(5)]
    crossed = None if crossing is None else (x(crossing), rate(crossing))
    return {
        "lines": lines,
        "width": width,
        "left": _LEFT,
        "right": width - _RIGHT,
        "height": _HEIGHT,
        "bottom": _HEIGHT - 38,
        "x": [(x(mark), rate(mark)) for mark in marks],
        "y": [(y(height), seconds(height)) for height in heights],
        "crossed": crossed,
        "hurts": swept[3].points[-1][1] > HURTS * swept[2].points[-1][1],
    }


def _columns(wrong: Errors) -> list[str]:
    time, memory = share(wrong.time), share(wrong.memory)
    return [f"peak{memory}", "fits", "host", "sent", f"step{time}", "exposed", f"speed{time}", "limited by"]


def _row(found: Estimate) -> tuple[str, list[str]]:
    return _name(found), [
        gigabytes(found.peak),
        "yes" if found.fits else "no",
        gigabytes(found.host),
        gigabytes(found.bytes_sent),
        seconds(found.seconds.total) if found.rate else "unknown",
        seconds(found.seconds.exposed),
        found.speed,
        found.limited_by,
    ]
