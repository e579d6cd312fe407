"""Charts: lines and dots over the number of ranks, as SVG, and the page that shows them. Nothing is loaded, no script.

Styles are those of `onecopy report`. A drawing has as many units as a phone has pixels, and grows with its column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, log2, log10
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

WIDTH: Final = 400
HEIGHT: Final = 270
_LEFT: Final = 46
_RIGHT: Final = 10
_TOP: Final = 8
_BOTTOM: Final = 38


class Dot(NamedTuple):
    """A point of a series, and whether it is drawn as one that can be had."""

    x: float
    y: float
    possible: bool = True


@dataclass(frozen=True)
class Chart:
    """Curves and dots over N, whose axis is logarithmic.

    Attributes:
        unit: of the vertical axis.
        curves: by name: lines; parts with a point that is not possible are dashed.
        dots: by name: single points.
        logarithmic: the vertical axis; else it begins at 0.
    """

    title: str
    unit: str
    curves: dict[str, list[Dot]]
    dots: dict[str, list[Dot]] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        legend: names of series that are explained, in the order of drawing.
    """

    title: str
    words: str
    charts: Sequence[Chart] = ()
    legend: Sequence[str] = ()
    tables: Sequence[Table] = ()


class _Frame:
    """Maps values to places."""

    def __init__(self, chart: Chart) -> None:
        points = [dot for series in (*chart.curves.values(), *chart.dots.values()) for dot in series]
        self.xs = sorted({dot.x for dot in points})
        ys = [dot.y for dot in points if dot.y > 0]
        self.logarithmic = chart.logarithmic
        if chart.logarithmic:
            low, high = log10(min(ys)), log10(max(ys))
            # Some room, and at least half a decade, or flat lines would look steep.
            room = max(0.08, (0.5 - (high - low)) / 2)
            self.low, self.high = low - room, high + room
        else:
            self.low, self.high = 0.0, 1.06 * max(ys)

    def x(self, value: float) -> float:
        span = log2(self.xs[-1] / self.xs[0]) or 1.0
        return _LEFT + 6 + log2(value / self.xs[0]) / span * (WIDTH - _LEFT - _RIGHT - 12)

    def y(self, value: float) -> float:
        height = log10(value) if self.logarithmic else value
        share = (height - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP)

    def heights(self) -> list[float]:
        """Where the grid's lines are."""
        if not self.logarithmic:
            step = _round_step(self.high / 5)
            return [step * i for i in range(int(self.high / step) + 1)]
        for steps in ((1, 2, 5), (1,)):
            found = [s * 10.0**e for e in range(-6, 12) for s in steps if self.low <= log10(s * 10.0**e) <= self.high]
            if len(found) <= 8:
                return found
        return found[:: ceil(len(found) / 8)]


def _round_step(value: float) -> float:
    power = 10.0 ** int(log10(value) // 1)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def svg(chart: Chart) -> str:
    """The chart as an SVG element."""
    frame = _Frame(chart)
    parts = []
    for height in frame.heights():
        y = frame.y(height)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(height)}</text>')
    bottom = HEIGHT - _BOTTOM
    parts.append(f'<line class="base" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    every = ceil(len(frame.xs) / 6)
    for number, x in enumerate(frame.xs):
        if number % every == (len(frame.xs) - 1) % every:
            parts.append(f'<text x="{frame.x(x):.1f}" y="{bottom + 15}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(_LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">N, ranks</text>')
    for name, dots in chart.curves.items():
        for possible, run in _runs(dots):
            places = " ".join(f"{frame.x(dot.x):.1f},{frame.y(dot.y):.1f}" for dot in run)
            kind = "line" if possible else "line impossible"
            words = name if possible else f"{name}, does not fit"
            parts.append(
                f'<polyline class="{kind} {slug(name)}" points="{places}"><title>{escape(words)}</title></polyline>'
            )
    for name, dots in chart.dots.items():
        for dot in dots:
            if dot.y > 0:
                words = f"{name}, N = {dot.x:g}: {dot.y:.4g} {chart.unit}"
                parts.append(
                    f'<circle class="{slug(name)}" cx="{frame.x(dot.x):.1f}" cy="{frame.y(dot.y):.1f}" r="3.5">'
                    f"<title>{escape(words)}</title></circle>"
                )
    label = escape(f"{chart.title}, {chart.unit}, over N")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _runs(dots: Sequence[Dot]) -> Iterable[tuple[bool, list[Dot]]]:
    """Pieces of a curve of one kind, each from the last point of the one before."""
    run = list(dots[:1])
    for last, dot in pairwise(dots):
        both = last.possible and dot.possible
        if len(run) > 1 and both != (run[0].possible and run[1].possible):
            yield not both, run
            run = [last]
        run.append(dot)
    if len(run) > 1:
        yield run[0].possible and run[1].possible, run


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def slug(name: str) -> str:
    """A name as a class of the style sheet."""
    return "s-" + "".join(c if c.isalnum() else "-" for c in name.partition(":")[0].lower()).strip("-")


def page(title: str, headline: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    folder = Path(__file__).parent / "templates"
    loader = ChoiceLoader([FileSystemLoader(folder), PackageLoader("onecopy.report")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"slug": slug, "svg": _drawn}
    style: Any = Markup(loader.get_source(environment, "style.css")[0])
    return environment.get_template("scaling.html").render(
        style=style, title=title, headline=headline, sections=sections
    )


def _drawn(chart: Chart) -> Markup:
    return Markup(svg(chart))
