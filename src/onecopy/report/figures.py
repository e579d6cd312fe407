"""Figures: the numbers behind the page's charts, as JSON for its script.

A chart is some thousand pixels wide. Longer series are thinned so that every extreme stays: a spike of one step in a
hundred thousand is what a reader looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

from onecopy.report.rows import assign_rows
from onecopy.report.run import CATEGORIES, LANES, PHASES, Run, Trace, categories, number, partly_counted

T = TypeVar("T")
Point = tuple[float, float | None]
Stack = tuple[float, list[float]]

LIMIT: Final = 2000
"""About as many points as a series has at most."""


def figures(run: Run) -> dict[str, Any]:
    """What the page's script draws."""
    samples = [step["memory"] for step in run.steps if isinstance(step.get("memory"), dict)]
    kinds = categories(*samples, *(sizes for trace in run.traces for _, sizes in trace.memory))
    return {
        "categories": [{"key": kind, "label": label(kind)} for kind in kinds],
        "lanes": LANES,
        "phases": PHASES,
        "memory": {"steps": _memory_steps(run, kinds), "peak": curve(run.steps, "peak_memory")},
        "traffic": _traffic(run),
        "training": {
            **{key: curve(run.steps, key) for key in ("loss", "tokens_per_second", "gradient_norm", "learning_rate")},
            "validation": curve(run.evaluations, "loss"),
        },
        "events": [(event.step, event.kind, event.seconds, event.words) for event in run.events],
        "traces": [_trace(trace, kinds) for trace in run.traces],
    }


def label(category: str) -> str:
    """A category in words."""
    return CATEGORIES.get(category, category.replace("_", " "))


def curve(records: Sequence[dict[str, Any]], key: str) -> list[Point]:
    """One value over the steps; None where it is not a finite number. Empty if no record has it."""
    return thin_curve([(record["step"], number(record[key])) for record in records if key in record])


def thin_curve(points: list[Point], limit: int = LIMIT) -> list[Point]:
    """The points, or of every bucket the lowest, the highest and the first gap."""
    if len(points) <= limit:
        return points
    kept: list[Point] = []
    for bucket in _buckets(points, limit // 3):
        # None where a value is missing: neither the lowest nor the highest.
        heights = [(height, place) for place, (_, height) in enumerate(bucket) if height is not None]
        gaps = [place for place, (_, height) in enumerate(bucket) if height is None]
        places = {min(heights)[1], max(heights)[1]} if heights else set()
        kept += [bucket[place] for place in sorted(places.union(gaps[:1]))]
    return kept


def thin_stacks(stacks: list[Stack], limit: int = LIMIT) -> list[Stack]:
    """The stacks, or the highest of every bucket."""
    if len(stacks) <= limit:
        return stacks
    return [max(bucket, key=lambda stack: sum(stack[1])) for bucket in _buckets(stacks, limit)]


def _buckets(series: list[T], count: int) -> list[list[T]]:
    cuts = [len(series) * bucket // count for bucket in range(count + 1)]
    return [series[start:end] for start, end in pairwise(cuts)]


def _memory_steps(run: Run, kinds: list[str]) -> list[Stack]:
    """What each step held. Activations that were counted in some steps alone would make those look larger."""
    drawn = [kind for kind in kinds if kind != "activations" or not partly_counted(run)]
    return thin_stacks(
        [
            (step["step"], [(number(step["memory"].get(kind)) or 0.0) if kind in drawn else 0.0 for kind in kinds])
            for step in run.steps
            if isinstance(step.get("memory"), dict)
        ]
    )


def _traffic(run: Run) -> dict[str, Any]:
    after_evaluation = {evaluation["step"] + 1 for evaluation in run.evaluations}
    records: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for step in run.steps:
        records[step["step"] in after_evaluation].append(step)
    total = run.summary.get("bytes_sent_per_step", {}).get("total", {})
    return {
        "sent": curve(records[False], "bytes_sent"),
        "after_evaluation": curve(records[True], "bytes_sent"),
        "formula": number(total.get("formula")),
    }


def _trace(trace: Trace, kinds: list[str]) -> dict[str, Any]:
    """A trace as columns, for a page of many ranks must stay light. Times are microseconds."""
    names = list(dict.fromkeys(event.name for event in trace.events))
    place = {name: number for number, name in enumerate(names)}
    lanes = {}
    for lane in LANES:
        events = [event for event in trace.events if event.lane == lane]
        lanes[lane] = [
            (
                round(event.start * 1e6, 1),
                round((event.end - event.start) * 1e6, 1),
                place[event.name],
                PHASES.index(event.phase),
                row,
                event.bytes,
            )
            for event, row in zip(events, assign_rows(events), strict=True)
        ]
    return {
        "rank": trace.rank,
        "step": trace.step,
        "end": trace.seconds * 1e6,
        "names": names,
        "lanes": lanes,
        "memory": thin_stacks(
            [(round(time * 1e6, 1), [sizes.get(kind, 0) for kind in kinds]) for time, sizes in trace.memory]
        ),
    }
