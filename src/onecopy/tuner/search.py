"""Search: which setting to try next, when to stop, and what was found. It starts nothing: probes are told to it.

A probe corrects what is believed of all other settings. The next one is that from which most is expected: how much
faster than the best it may be, times the probability that it fits. When the best that could still come is within the
noise of the best found, settings whose steps scatter too much to say which of them is the best are probed again. Then
the search ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from onecopy.planner.machine.calibration import Calibration
from onecopy.tuner.belief import Belief, Expected, Point, below, improvement
from onecopy.tuner.candidate import Candidate, needs_as_much
from onecopy.tuner.expectation import OVERHEAD, Expectation
from onecopy.tuner.outcome import Outcome

Objective = Literal["tokens_per_second", "memory", "cost"]

OBJECTIVES: Final[tuple[Objective, ...]] = ("tokens_per_second", "memory", "cost")
"""The shortest step; the least memory, and of as little the shortest step; the fewest rank-seconds a sample."""

TIMES: Final = ("compute", "memory", "link", "latency", "transfer", "overhead")
_TIMES_PRIOR: Final = (0.7, 0.7, 0.7, 1.5, 0.7, 1.5)
_BYTES_PRIOR: Final = (0.3, 0.3, 0.3)
_KNOWN_BETTER: Final = 0.3
"""By which the priors shrink where this machine was calibrated before."""

_UNKNOWN_TIME: Final = 0.10
_UNKNOWN_BYTES: Final = 0.04
"""Share of seconds and of bytes that the planner's formulas are off by beyond their constants. Assumptions."""

NOISE: Final = 0.01
"""Settings whose values differ by a smaller share are alike, however well they repeat."""

NOISIEST: Final = 0.02
"""A best setting that repeats worse than so is not the end: others are tried while there is a budget."""

_HOPELESS: Final = 0.02
"""Settings that fit with a smaller probability are not waited for."""

_CAUTION: Final = 1.5
"""Standard deviations below what is expected at which the best is taken to be that could still come."""

_LEAST: Final = 3
"""Probes that have to be measured before the search may end by itself."""

_AGAIN: Final = 4
"""Probes of settings that were measured before, at the most."""


class Search:
    """The state of a search.

    Args:
        candidates: all settings.
        expectation: what the planner says of them.
        limit: bytes that a rank may hold; None for what the expectation's machine has.
        calibration: of this machine, from before.

    Attributes:
        tried: what became of each setting that was probed, in order.
        probes: how many there were; some settings are probed more than once.
        ended: why nothing more is to be tried; "" while there is.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        expectation: Expectation,
        objective: Objective = "tokens_per_second",
        limit: float | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.tried: dict[Candidate, Outcome] = {}
        self.probes = 0
        self.ended = ""
        self.candidates = list(candidates)
        self.objective = objective
        self.limit = limit or expectation.machine.gpu.memory
        self._expectation = expectation
        self._start = calibration or Calibration()
        self._base = 0.0
        self._learnt = True
        trust = 1.0 if calibration is None else _KNOWN_BETTER
        self.seconds = Belief(self._log_seconds, [trust * sd for sd in _TIMES_PRIOR], _UNKNOWN_TIME)
        self.bytes = Belief(self._log_bytes, [trust * sd for sd in _BYTES_PRIOR], _UNKNOWN_BYTES)

    # --- what is known

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take in a probe, of a new setting or of one that was probed before."""
        before = self.tried.get(candidate)
        self.tried[candidate] = outcome if before is None else before.with_more(outcome)
        self.probes += 1
        self._base = max([known.base for known in self.tried.values()])
        self._learnt = False

    @property
    def measured(self) -> dict[Candidate, Outcome]:
        """Probes that ran to their end."""
        return {one: known for one, known in self.tried.items() if known.kind == "measured"}

    def value(self, candidate: Candidate, outcome: Outcome) -> float:
        """What is to be small, as a logarithm: seconds of a step, bytes, or rank-seconds of a step."""
        if self.objective == "memory":
            return math.log(outcome.peak)
        assert outcome.timed is not None
        return math.log(outcome.timed.seconds) + (math.log(candidate.ranks) if self.objective == "cost" else 0.0)

    def ranking(self) -> list[Candidate]:
        """Measured settings, the best first."""
        known = self.measured
        rounded = 2 * NOISE

        def place(one: Candidate) -> tuple[float, float]:
            timed = known[one].timed
            assert timed is not None
            value = self.value(one, known[one])
            # Memory that differs by less than it repeats is alike, and then the faster one is better.
            return (round(value / rounded) if self.objective == "memory" else value, timed.seconds)

        return sorted(known, key=place)

    @property
    def best(self) -> Candidate | None:
        """The best setting that was measured."""
        return next(iter(self.ranking()), None)

    @property
    def calibration(self) -> Calibration:
        """The constants of this machine as they are believed to be."""
        self._learn()
        times = self._times(self.seconds.theta)
        return replace(times, **self._memories(self.bytes.theta), probes=len(self.measured))

    def expected_seconds(self, candidates: Sequence[Candidate]) -> list[Expected]:
        """Logarithms of the seconds of a step."""
        self._learn()
        return self.seconds.at(candidates)

    def expected_bytes(self, candidates: Sequence[Candidate]) -> list[Expected]:
        """Logarithms of the bytes of a rank."""
        self._learn()
        return self.bytes.at(candidates)

    # --- what to do

    def next(self) -> Candidate | None:
        """The setting to try; None when the search is over, and `ended` says why.

        A setting that was measured before comes again where its steps and the best one's scatter too much to tell them
        apart.
        """
        return self._new() or self._undecided()

    def _undecided(self) -> Candidate | None:
        """Of the settings that may be the best, the one that is known least; None where that is known well enough."""
        best = self.best
        if best is None or self.objective == "memory" or self.probes - len(self.tried) >= _AGAIN:
            return None
        goal = self.value(best, self.tried[best]) + self._error(best)
        close = [one for one in self.ranking() if self.value(one, self.tried[one]) - self._error(one) <= goal]
        least_known = max(close, key=self._error)
        if len(close) == 1 or self._error(least_known) <= NOISE:
            return None
        self.ended = ""
        return least_known

    def _error(self, candidate: Candidate) -> float:
        """The standard error of a measured time, as a share of it."""
        timed = self.tried[candidate].timed
        assert timed is not None
        return timed.error

    def _new(self) -> Candidate | None:
        """The setting that was not tried yet and from which most is expected."""
        left = [one for one in self.candidates if one not in self.tried and not self.is_hopeless(one)]
        if not left:
            self.ended = "every setting that may fit was tried"
            return None
        fits = [below(one, math.log(self.limit)) for one in self.expected_bytes(left)]
        if max(fits) < _HOPELESS:
            self.ended = "nothing that is left can be expected to fit"
            return None
        expected = self._expected_values(left)
        best = self.best
        if best is None:
            return min(zip(left, expected, fits, strict=True), key=lambda it: it[1].mean - math.log(it[2] + 1e-9))[0]
        goal = self.value(best, self.tried[best])
        if len(self.measured) >= _LEAST:
            hopeful = [one for one, fit in zip(expected, fits, strict=True) if fit >= _HOPELESS]
            nearest = min(one.mean - _CAUTION * one.sd for one in hopeful)
            if nearest >= goal - self.noise(best):
                gain = math.expm1(max(0.0, goal - nearest))
                self.ended = (
                    f"the best that could still come is better by {gain:.1%} at the most, within the noise of "
                    f"{self.noise(best):.1%} of the best found"
                )
                return None
        gains = [improvement(one, goal) * fit for one, fit in zip(expected, fits, strict=True)]
        return left[max(range(len(left)), key=gains.__getitem__)]

    def noise(self, candidate: Candidate) -> float:
        """The share by which a measured value may be off."""
        timed = self.tried[candidate].timed
        assert timed is not None
        return NOISE if self.objective == "memory" else max(NOISE, min(2 * timed.error, NOISIEST))

    def is_hopeless(self, candidate: Candidate) -> bool:
        """Whether the setting is sure to need more than another setting that ran out of memory."""
        return any(
            known.kind == "out of memory"
            and needs_as_much(candidate, one, known.phase or "forward")
            and self._expectation.sure_to_need_more(candidate, one)
            for one, known in self.tried.items()
        )

    # --- beliefs

    def _expected_values(self, candidates: Sequence[Candidate]) -> list[Expected]:
        if self.objective == "memory":
            return self.expected_bytes(candidates)
        expected = self.expected_seconds(candidates)
        if self.objective == "cost":
            return [
                one._replace(mean=one.mean + math.log(c.ranks)) for one, c in zip(expected, candidates, strict=True)
            ]
        return expected

    def _times(self, theta: Sequence[float]) -> Calibration:
        start = self._start
        factors = {name: getattr(start, name) * math.exp(t) for name, t in zip(TIMES[:-1], theta, strict=False)}
        return replace(start, **factors, overhead=(start.overhead or OVERHEAD) * math.exp(theta[-1]))

    def _memories(self, theta: Sequence[float]) -> dict[str, float]:
        start = self._start
        base = self._base or start.base
        return {
            "states": start.states * math.exp(theta[0]),
            "activations": start.activations * math.exp(theta[1]),
            "base": base * math.exp(theta[2]),
        }

    def _log_seconds(self, candidate: Candidate, theta: Sequence[float]) -> float:
        return math.log(self._expectation.seconds(candidate, self._times(theta)))

    def _log_bytes(self, candidate: Candidate, theta: Sequence[float]) -> float:
        return math.log(self._expectation.memory(candidate, replace(self._start, **self._memories(theta))))

    def _learn(self) -> None:
        """Believe what was tried since it was last asked."""
        if self._learnt:
            return
        self._learnt = True
        times, sizes = [], []
        for one, known in self.tried.items():
            if (timed := known.timed) is not None:
                times.append(Point(one, math.log(timed.seconds), max(NOISE, timed.error)))
                sizes.append(Point(one, math.log(known.peak), NOISE))
        self.seconds.learn(times)
        self.bytes.learn(sizes)
        # What ran out needs more than it was allowed; that says something only where less was expected.
        short = [(one, math.log(1.02 * known.needs)) for one, known in self.tried.items() if _ran_out(known)]
        for _ in range(2):
            expected = self.bytes.at([one for one, _ in short])
            surprises = [
                Point(one, need, 0.05) for (one, need), it in zip(short, expected, strict=True) if it.mean < need
            ]
            self.bytes.learn([*sizes, *surprises])


def _ran_out(known: Outcome) -> bool:
    return known.kind == "out of memory" and known.needs > 0
