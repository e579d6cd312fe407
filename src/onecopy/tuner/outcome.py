"""Outcome: what a probe says of its setting: seconds and bytes, or how it failed, in which phase and at how many bytes.

===============  ===========================================================================================
kind             what it is
===============  ===========================================================================================
measured         steps were timed, and memory counted
slow             the first timed steps were so much slower than the best that it was not measured further
out of memory    an allocation failed, or the system ended a rank for its memory: the setting needs more
hang             no rank gave a sign of life for the time that a probe may be silent, or it used up its time
crash            a rank raised something else, or died
===============  ===========================================================================================
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from onecopy.planner.quantities import gigabytes
from onecopy.tuner.probe.order import PHASES, Limits, Phase, Report
from onecopy.tuner.steps import Timed, settle

Kind = Literal["measured", "slow", "out of memory", "hang", "crash"]


@dataclass(frozen=True)
class Outcome:
    """What became of a probe.

    Attributes:
        kind: see above.
        steps: seconds of each step, the slowest rank's.
        peak: bytes of the rank that held most, as the system counted; where it ran out, what it held then.
        base: bytes that a process held before the model was built.
        metered: bytes by the meter's categories of the rank that held most by it.
        off_device: bytes by category in host memory or files, likewise.
        phase, step, rank: where a failing probe was.
        asked: bytes of the allocation that failed, where they are known.
        limit: bytes that a rank was allowed; None for no limit.
        message: what was raised, or how it ended.
        traceback: of what was raised.
        took: seconds of the whole probe.
    """

    kind: Kind
    steps: tuple[float, ...] = ()
    peak: int = 0
    base: int = 0
    metered: dict[str, int] = field(default_factory=dict)
    off_device: dict[str, int] = field(default_factory=dict)
    phase: Phase | None = None
    step: int = 0
    rank: int = 0
    asked: int | None = None
    limit: int | None = None
    message: str = ""
    traceback: str = ""
    took: float = 0.0

    @property
    def timed(self) -> Timed | None:
        """Seconds of a step, where steps were timed."""
        return settle(self.steps) if self.kind in ("measured", "slow") else None

    @property
    def needs(self) -> int:
        """Bytes that the setting needs at the least: what it held, and what it asked for in vain."""
        if self.kind != "out of memory":
            return self.peak
        return max(self.peak + (self.asked or 0), self.limit or 0)

    def with_more(self, second: Outcome) -> Outcome:
        """This outcome and that of the same setting's next probe; a setting that fails once has failed."""
        if self.kind != "measured" or second.timed is None:
            return second
        steps = (*self.steps, *second.steps[second.timed.warmup :])
        return replace(self, steps=steps, peak=max(self.peak, second.peak), took=self.took + second.took)

    def words(self) -> str:
        """In one line."""
        if self.kind in ("measured", "slow"):
            timed = self.timed
            assert timed is not None
            cut = ", too slow to go on" if self.kind == "slow" else ""
            return f"{timed.seconds * 1e3:,.1f} ms ± {timed.spread:.1%} at {gigabytes(self.peak)}{cut}"
        where = f" in {self.phase}" + (f" of step {self.step + 1}" if self.phase in PHASES[3:] else "")
        if self.phase is None:
            where = " before it began"
        if self.kind == "out of memory":
            asked = f", asked for {gigabytes(self.asked)} more" if self.asked else ""
            allowed = f" of {gigabytes(self.limit)}" if self.limit else ""
            return f"out of memory{where}: held {gigabytes(self.peak)}{allowed}{asked}"
        return f"{self.kind}{where}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """For files; `from_dict` reads it."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Outcome:
        """What `as_dict` gave, as JSON has it."""
        return Outcome(**{**values, "steps": tuple(values["steps"])})


def outcome_of(reports: Sequence[Report], limits: Limits, took: float) -> Outcome:
    """What the ranks' reports say together.

    Args:
        reports: of all ranks.
        limits: that they had.
        took: seconds of the probe.
    """
    common: dict[str, Any] = {"limit": limits.memory, "took": took, "base": max(report.base for report in reports)}
    most = max(reports, key=lambda report: report.peak)
    if all(report.metered for report in reports):
        highest = max(reports, key=lambda report: sum(report.metered.values()))
        return Outcome(
            "slow" if any(report.gave_up for report in reports) else "measured",
            tuple(map(max, zip(*(report.steps for report in reports), strict=False))),
            most.peak,
            metered=highest.metered,
            off_device=highest.off_device,
            **common,
        )
    if short := [report for report in reports if report.memory]:
        first = min(short, key=lambda report: report.at)
        return Outcome(
            "out of memory",
            peak=max(report.peak for report in short),
            asked=first.asked,
            message=first.error or f"ended by {signal.Signals(signal.SIGKILL).name}",
            **_where(first),
            **common,
        )
    # What a rank raised by itself comes before what others saw of it.
    if own := [report for report in reports if report.ended == "itself" and (report.error or report.code)]:
        first = min(own, key=lambda report: report.at)
        return Outcome(
            "crash",
            peak=most.peak,
            message=first.error or f"exit code {first.code}",
            traceback=first.traceback,
            **_where(first),
            **common,
        )
    behind = min(reports, key=lambda report: (report.step, PHASES.index(report.phase) if report.phase else -1))
    if any(report.ended in ("silence", "time") for report in reports):
        seconds = limits.silence if any(report.ended == "silence" for report in reports) else limits.seconds
        why = "no sign of life for" if any(report.ended == "silence" for report in reports) else "not done within"
        return Outcome("hang", peak=most.peak, message=f"{why} {seconds:g} s", **_where(behind), **common)
    return Outcome(
        "crash",
        peak=most.peak,
        message=behind.error or "its ranks lost each other",
        traceback=behind.traceback,
        **_where(behind),
        **common,
    )


def _where(report: Report) -> dict[str, Any]:
    return {"phase": report.phase, "step": report.step, "rank": report.rank}
