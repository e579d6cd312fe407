"""Run: what a run directory holds, read forgivingly.

A run that was killed leaves less than one that ended. What is missing or broken becomes a note, which the page shows
where the reader would have looked for it; only a directory that holds no run at all is an error.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.report import words
from onecopy.untrusted import parse_json, read_json

LANES: Final = ("compute", "gather", "reduce", "wait")
PHASES: Final = ("forward", "backward", "step", "setup", "load", "save")
CATEGORIES: Final = {
    "parameters_sliced": "parameters, sliced",
    "parameters_gathered": "parameters, gathered",
    "gradients_whole": "gradients, whole",
    "gradients_sliced": "gradients, sliced",
    "optimizer": "optimizer states",
    "activations": "activations",
    "checkpoints": "activation checkpoints",
    "communication": "communication buffers",
    "mirror": "mirrors of other ranks",
    "other": "other",
}
"""Categories of memory, in the order in which they are stacked."""


@dataclass(frozen=True)
class Event:
    """A span of time on one rank.

    Attributes:
        lane: "compute", "gather", "reduce" or "wait"; a wait is time in which nothing was computed.
        phase: "forward", "backward", "step" or "setup".
        start, end: seconds from the start of the step; what was under way then starts below zero.
        bytes: sent by this rank.
    """

    name: str
    lane: str
    phase: str
    unit: str
    start: float
    end: float
    bytes: int


@dataclass(frozen=True)
class Trace:
    """One step of one rank.

    Attributes:
        events: in order of their starts.
        memory: (seconds from the start of the step, live bytes by category), in order of time.
    """

    rank: int
    step: int
    events: list[Event]
    memory: list[tuple[float, dict[str, int]]]

    @property
    def seconds(self) -> float:
        """When its last event or sample is."""
        return max([event.end for event in self.events] + [time for time, _ in self.memory], default=0.0)

    def busy(self, *lanes: str) -> float:
        """Seconds in which at least one event of the lanes went on: a unit's computation may hold another's."""
        total, reached = 0.0, -math.inf
        for event in self.events:
            if event.lane in lanes and event.end > reached:
                total += event.end - max(event.start, reached)
                reached = event.end
        return total


@dataclass(frozen=True)
class Happened:
    """What happened to ranks.

    Attributes:
        step: before which it happened.
        kind: "recovery", they were lost and came back from their peers' memory; "slow", they did not answer.
        seconds: that the loss cost, or for which there was no answer.
        words: all of it.
    """

    step: int
    kind: str
    seconds: float
    words: str


@dataclass
class Run:
    """What was found.

    Attributes:
        config: the settings, by section and key.
        steps: metrics of training steps.
        evaluations: metrics of evaluations.
        events: ranks that were lost and came back, or were slow, in order of the steps before which it happened.
        summary: the run in numbers.
        machine: what it ran on.
        traces: one for each rank that left one, in order of ranks.
        notes: by source ("config", "metrics", "summary", "machine", "trace"), why there is nothing or not all of it.
    """

    directory: Path
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def number(value: Any) -> float | None:
    """The value as a finite number, or None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def steps_with_activations(run: Run) -> list[dict[str, Any]]:
    """The steps in which activations were counted: the meter sees them only while a step is profiled."""
    return [step for step in run.steps if isinstance(step.get("memory"), dict) and step["memory"].get("activations")]


def partly_counted(run: Run) -> bool:
    """Whether activations were counted in some of the recorded steps, and not in all."""
    recorded = [step for step in run.steps if isinstance(step.get("memory"), dict)]
    return 0 < len(steps_with_activations(run)) < len(recorded)


def categories(*samples: dict[str, Any]) -> list[str]:
    """The categories that occur, known ones first, so that no bytes are left out."""
    found = dict.fromkeys(name for sample in samples for name in sample)
    return [name for name in CATEGORIES if name in found] + [name for name in found if name not in CATEGORIES]


def read_run(directory: Path) -> Run:
    """Read a run directory.

    Raises:
        SettingsError: if there is no run in it.
    """
    expected = "expected what `onecopy train` writes: config.toml, metrics.jsonl, summary.json, trace/rank-<r>.json"
    if not directory.is_dir():
        raise SettingsError(f"there is no run directory {str(directory)!r}; {expected}")
    if not any((directory / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        raise SettingsError(f"{str(directory)!r} holds no run; {expected}")
    run = Run(directory)
    run.config = _read_table(run, "config", "config.toml", "the settings are not known")
    run.summary = _read_table(run, "summary", "summary.json", "the run was killed, or is still going on")
    run.machine = _read_table(run, "machine", "machine.json", "the machine is not known")
    _read_metrics(run)
    _read_traces(run)
    return run


def _read_table(run: Run, source: str, name: str, meaning: str) -> dict[str, Any]:
    path = run.directory / name
    if not path.is_file():
        run.notes[source] = f"There is no {name}: {meaning}."
        return {}
    try:
        table = read_json(path, follow=True) if path.suffix == ".json" else tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        run.notes[source] = f"{name} cannot be read ({error}): {meaning}."
        return {}
    if not isinstance(table, dict):
        run.notes[source] = f"{name} holds no table: {meaning}."
        return {}
    return table


def _read_metrics(run: Run) -> None:
    path = run.directory / "metrics.jsonl"
    if not path.is_file():
        run.notes["metrics"] = "There is no metrics.jsonl: no step was recorded."
        return
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record: Any = parse_json(line.encode())
            if record["kind"] in ("recovery", "slow"):
                run.events.append(_happened(record))
                continue
            rows = {"train": run.steps, "evaluation": run.evaluations}[record["kind"]]
            rows.append({**record, "step": int(record["step"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            broken += 1
    if broken:
        run.notes["metrics"] = f"{broken} line(s) of metrics.jsonl cannot be read and are left out."
    elif not run.steps:
        run.notes["metrics"] = "metrics.jsonl is empty: no step was recorded."


def _happened(record: dict[str, Any]) -> Happened:
    kind, step = record["kind"], int(record["step"])
    seconds = number(record.get("lost_seconds", record["seconds"])) or 0.0
    found = record.get("ranks")
    who = words.ranks([int(rank) for rank in found]) if isinstance(found, list) else "a rank"
    return Happened(step, kind, seconds, words.event(kind, who, seconds, given_up=record.get("given_up") == 1))


def _read_traces(run: Run) -> None:
    notes = []
    for path in (run.directory / "trace").glob("rank-*.json"):
        try:
            run.traces.append(_trace(read_json(path, follow=True)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            notes.append(f"trace/{path.name} cannot be read and is left out ({type(error).__name__}: {error}).")
    run.traces.sort(key=lambda trace: trace.rank)
    if not run.traces:
        notes.append("No trace of a step was recorded (trace/rank-<r>.json).")
    if notes:
        run.notes["trace"] = " ".join(sorted(notes))


def _trace(raw: dict[str, Any]) -> Trace:
    events = [_event(event) for event in raw.get("events", [])]
    memory = [
        (float(sample["time"]), {name: int(size) for name, size in sample.items() if name != "time"})
        for sample in raw.get("memory", [])
    ]
    return Trace(
        rank=int(raw["rank"]),
        step=int(raw["step"]),
        events=sorted(events, key=lambda event: (event.start, -event.end)),
        memory=sorted(memory, key=lambda sample: sample[0]),
    )


def _event(raw: dict[str, Any]) -> Event:
    event = Event(
        name=str(raw["name"]),
        lane=raw["lane"],
        phase=raw["phase"],
        unit=str(raw.get("unit", "")),
        start=float(raw["start"]),
        end=float(raw["end"]),
        bytes=int(raw.get("bytes") or 0),
    )
    if event.lane not in LANES or event.phase not in PHASES or not -math.inf < event.start <= event.end < math.inf:
        raise ValueError(f"no such event: {raw!r}")
    return event
