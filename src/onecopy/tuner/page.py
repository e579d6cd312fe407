"""Page: a search as one HTML file: memory against throughput of all probes, planned beside measured.

It has no script and needs no network. The drawing is SVG, made here; the style is that of `onecopy report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any, Final, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from onecopy.planner.quantities import gigabytes, seconds
from onecopy.tuner.tuned import Probe, Tuned

WIDTH: Final = 760
HEIGHT: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 20, 50
_BAND: Final = 46
"""Height of the band in which what ran out of memory is marked."""


class Mark(NamedTuple):
    """One probe in the chart, in pixels; where it was planned before any correction, too."""

    x: float
    y: float
    planned_x: float
    planned_y: float
    stage: int
    best: bool
    words: str


class Lost(NamedTuple):
    """One probe that ran out of memory: what it held when it did, in pixels."""

    x: float
    stage: int
    words: str


def render(tuned: Tuned) -> str:
    """The page."""
    loader = ChoiceLoader([PackageLoader("onecopy.tuner"), PackageLoader("onecopy.report")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("tune.html").render(
        style=Markup(loader.get_source(environment, "style.css")[0]),
        title=tuned.name,
        tuned=tuned,
        headline=f"{tuned.ranks} ranks, {tuned.global_batch} samples a step"
        + (f", {gigabytes(tuned.limit)} a rank" if tuned.limit else ""),
        tiles=_tiles(tuned),
        chart=_chart(tuned),
        rows=[_row(tuned, probe) for probe in tuned.probes],
        errors=[(name, f"{before:.1%}", f"{after:.1%}") for name, (before, after) in tuned.errors().items()],
        call=tuned.shard_call if tuned.best else None,
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        bottom=HEIGHT - _BOTTOM,
        band=_BAND,
    )


def _tiles(tuned: Tuned) -> list[tuple[str, str, str]]:
    best = tuned.best
    if best is None:
        return []
    timed = best.outcome.timed
    assert timed is not None
    return [
        ("take", f"stage {best.candidate.stage}", best.candidate.words().partition(", ")[2]),
        ("speed", tuned.speed(best), f"{seconds(timed.seconds)} a step ± {timed.spread:.1%}"),
        ("memory", gigabytes(best.outcome.peak), f"of {gigabytes(tuned.limit)} a rank" if tuned.limit else "a rank"),
        ("probes", str(len(tuned.probes)), f"of {tuned.candidates} settings; {tuned.left_out} left out as too large"),
    ]


def _throughput(tuned: Tuned, probe: Probe, step: float) -> float:
    """Tokens a second, or samples."""
    return probe.candidate.samples * (tuned.tokens or 1) / step


def _chart(tuned: Tuned) -> dict[str, Any] | None:
    measured = [(probe, probe.outcome.timed) for probe in tuned.probes if probe.outcome.timed]
    lost = [probe for probe in tuned.probes if probe.outcome.kind == "out of memory"]
    if not measured:
        return None
    speeds = [_throughput(tuned, probe, timed.seconds) for probe, timed in measured if timed]
    planned = [_throughput(tuned, probe, probe.expected_seconds) for probe, _ in measured]
    sizes = [probe.outcome.peak for probe, _ in measured] + [probe.outcome.peak for probe in lost]
    sizes += [int(probe.expected_bytes) for probe, _ in measured]
    near = tuned.limit if tuned.limit and tuned.limit < 1.5 * max(sizes) else None
    least, largest = min(sizes), max([*sizes, *([near] if near else [])])
    margin = 0.08 * (largest - least or least)
    low, high = least - margin, largest + margin
    most = 1.1 * max(*speeds, *planned)

    def x(nbytes: float) -> float:
        return _LEFT + (nbytes - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(speed: float) -> float:
        span = HEIGHT - _TOP - _BOTTOM - _BAND
        return _TOP + span * (1 - speed / most)

    marks = [
        Mark(
            x(probe.outcome.peak),
            y(speed),
            x(probe.expected_bytes),
            y(expected),
            probe.candidate.stage,
            probe is tuned.best,
            f"{probe.candidate.words()}: {probe.outcome.words()}; planned, after correction, "
            f"{seconds(probe.expected_seconds)} at {gigabytes(probe.expected_bytes)}",
        )
        for (probe, _), speed, expected in zip(measured, speeds, planned, strict=True)
    ]
    points = [(mark.x, mark.y) for mark in marks]
    return {
        "marks": marks,
        "lost": [
            Lost(x(probe.outcome.peak), probe.candidate.stage, f"{probe.candidate.words()}: {probe.outcome.words()}")
            for probe in lost
        ],
        "frontier": frontier(points, right=WIDTH - _RIGHT),
        "limit": None if near is None else x(near),
        "limit_words": gigabytes(near) if near else "",
        "x": [(x(value), gigabytes(value)) for value in _ticks(low, high, 5)],
        "y": [(y(value), f"{value:,.4g}") for value in _ticks(0.0, most, 5)],
        "rate": "tokens a second" if tuned.tokens else "samples a second",
        "stages": sorted({probe.candidate.stage for probe in tuned.probes}),
    }


def frontier(points: Sequence[tuple[float, float]], right: float) -> str:
    """The path of the settings than which none is faster with as little memory, as steps.

    Args:
        points: in pixels: memory to the right, speed upwards, where y is small.
        right: where the chart ends.
    """
    path, highest = "", float("inf")
    for x, y in sorted(points):
        if y < highest:
            path += f"M{x:.1f} {y:.1f}" if not path else f"H{x:.1f}V{y:.1f}"
            highest = y
    return f"{path}H{right:.1f}" if path else ""


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two, about so many."""
    rough = (high - low) / count
    size = 10 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = -(-low // step)
    return [step * (first + i) for i in range(int(high // step - first) + 1)]


def _row(tuned: Tuned, probe: Probe) -> list[str]:
    outcome, timed = probe.outcome, probe.outcome.timed
    what = outcome.kind if outcome.phase is None else f"{outcome.kind}, in {outcome.phase}"
    return [
        probe.candidate.words(),
        what,
        f"{seconds(timed.seconds)} ± {timed.spread:.1%}" if timed else "",
        seconds(probe.planned_seconds),
        seconds(probe.expected_seconds),
        tuned.speed(probe) if timed else "",
        gigabytes(outcome.peak) if outcome.peak else "",
        gigabytes(probe.planned_bytes),
        gigabytes(probe.expected_bytes),
        gigabytes(sum(outcome.metered.values())) if outcome.metered else "",
    ]
