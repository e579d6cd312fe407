"""Drawing: bars and timelines as SVG files that stand alone, light or dark as the reader's system is.

Colours are those of `onecopy report`. A drawing is 400 units wide, a phone's width, with text of 12 units or more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from markupsafe import escape

WIDTH: Final = 400
_EDGE: Final = 12
_LINE: Final = 17
_SHOWN: Final = 520
"""Width in pixels where nothing says how wide it is to be."""


class Bar(NamedTuple):
    """A bar below its name.

    Attributes:
        name: over the bar, at the left.
        parts: length by colour, a name of the style sheet.
        words: behind the bar.
        group: a heading over the bar, if it differs from the one of the bar before.
        floor: a mark across the bar, such as what a formula says; None for none.
    """

    name: str
    parts: Mapping[str, float]
    words: str
    group: str = ""
    floor: float | None = None


class Span(NamedTuple):
    """Something that took from ``start`` to ``end``, in one colour."""

    colour: str
    start: float
    end: float


@cache
def _colours() -> list[tuple[str, str, str]]:
    """Names of the report's colours, light and dark."""
    style = files("onecopy.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    return re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)


def _style() -> str:
    light = "".join(f"--{name}:{colour};" for name, colour, _ in _colours())
    dark = "".join(f"--{name}:{colour};" for name, _, colour in _colours())
    return (
        f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}"
        "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:var(--ink)}"
        ".title{font-weight:600;font-size:14px}.quiet{fill:var(--quiet)}.group{font-weight:600}"
        ".floor{stroke:var(--ink);stroke-width:1.5}.base{stroke:var(--line)}</style>"
    )


def _frame(title: str, parts: Sequence[str], height: float) -> str:
    shown = round(height * _SHOWN / WIDTH)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{_SHOWN}" height="{shown}" '
        f'role="img" aria-label="{escape(title)}">{_style()}'
        f'<rect width="{WIDTH}" height="{height:g}" rx="6" style="fill:var(--ground)"/>' + "\n".join(parts) + "</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    marked = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{marked} text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{max(width, 0.4):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} style="fill:var(--{colour})"/>'


def _head(title: str, notes: Sequence[str], legend: Mapping[str, str]) -> tuple[list[str], float]:
    """Title, notes and legend (name by colour), and the height that they take."""
    y = _EDGE + 12.0
    parts = [_text(_EDGE, y, title, "title")]
    for note in notes:
        y += _LINE
        parts.append(_text(_EDGE, y, note, "quiet"))
    x = float(_EDGE)
    y += _LINE + 4 if legend else 0
    for colour, name in legend.items():
        # DejaVu Sans is the widest font that text may come in: 7.4 units a letter.
        width = 16 + 7.4 * len(name) + 10
        if x > _EDGE and x + width - 10 > WIDTH - _EDGE:
            x, y = float(_EDGE), y + _LINE
        parts += [_box(x, y - 9, 10, 10, colour), _text(x + 16, y, name)]
        x += width
    return parts, y + 10


def bars(
    title: str, shown: Sequence[Bar], *, notes: Sequence[str] = (), legend: Mapping[str, str] | None = None
) -> str:
    """Horizontal bars, to one scale.

    Args:
        legend: what colours mean, by colour.
    """
    parts, y = _head(title, notes, legend or {})
    longest = max(max(sum(bar.parts.values()), bar.floor or 0.0) for bar in shown)
    room = WIDTH - 2 * _EDGE - 7.4 * max(len(bar.words) for bar in shown) - 6
    group = ""
    for bar in shown:
        if bar.group != group:
            group = bar.group
            y += _LINE + 4
            parts.append(_text(_EDGE, y, group, "group"))
        y += _LINE
        parts.append(_text(_EDGE, y, bar.name))
        y += 5
        x = float(_EDGE)
        for colour, length in bar.parts.items():
            width = length / longest * room
            parts.append(_box(x, y, width, 14, colour))
            x += width
        if bar.floor is not None:
            at = _EDGE + bar.floor / longest * room
            parts.append(f'<line class="floor" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 2:.1f}" y2="{y + 16:.1f}"/>')
            x = max(x, at)
        parts.append(_text(x + 6, y + 11, bar.words))
        y += 18
    return _frame(title, parts, y + _EDGE)


def timelines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[Span]]],
    *,
    end: float,
    unit: str,
    notes: Sequence[str] = (),
    legend: Mapping[str, str] | None = None,
) -> str:
    """Panels of lanes over one axis of time.

    Args:
        panels: spans by lane, by panel.
        end: of the axis, in ``unit``.
    """
    parts, y = _head(title, notes, legend or {})
    left = _EDGE + 62
    room = WIDTH - _EDGE - left
    for name, lanes in panels.items():
        y += _LINE + 6
        parts.append(_text(_EDGE, y, name, "group"))
        y += 6
        for lane, spans in lanes.items():
            parts.append(_text(left - 6, y + 12, lane, "quiet", "end"))
            for span in spans:
                width = (span.end - span.start) / end * room
                parts.append(_box(left + span.start / end * room, y + 2, width, 12, span.colour))
            y += 16
        parts.append(f'<line class="base" x1="{left}" x2="{WIDTH - _EDGE}" y1="{y + 2:.1f}" y2="{y + 2:.1f}"/>')
    y += _LINE + 2
    for share in (0.0, 0.5, 1.0):
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(_text(left + share * room, y, f"{share * end:.0f} {unit}", "quiet", anchor))
    return _frame(title, parts, y + _EDGE)
