"""Sweep: how step times change with one quantity, and where stage 3's extra traffic becomes what a step waits for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.machine.machine import Machine, with_link
from onecopy.planner.model.shape import from_count
from onecopy.planner.quantities import count, parse_rate, rate

HURTS: Final = 1.10
"""Stage 3 is taken to hurt where its step takes a tenth longer than stage 2's of the same micro-batches."""


@dataclass(frozen=True)
class Curve:
    """Step times of one stage over the link's bandwidth.

    Attributes:
        points: (bytes a second, seconds of a step), rising.
    """

    stage: int
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Threshold:
    """Where stage 3 begins to hurt when one quantity is changed and all others stay.

    Attributes:
        quantity: its name.
        now: its value in the plan.
        at: where the ratio of step times passes `HURTS`; None if it does not in the range looked at.
        hurts: the side on which it hurts: "below" or "above".
        words: turns values into text.
    """

    quantity: str
    now: float
    at: float | None
    hurts: str
    words: Callable[[float], str]

    def text(self) -> str:
        """One line for people."""
        if self.at is None:
            return f"{self.quantity}: no threshold in reach of {self.words(self.now)}"
        return f"{self.quantity}: {self.hurts} {self.words(self.at)} (now {self.words(self.now)})"


def parse_range(text: str) -> tuple[str, float, float]:
    """("link", low, high) in bytes a second from "link=10gbit..800gbit".

    Raises:
        SettingsError: if it is not written so.
    """
    name, _, limits = text.partition("=")
    low, dots, high = limits.partition("..")
    if name != "link" or not dots:
        raise SettingsError(f"a sweep must be written like link=10gbit..800gbit; found {text!r}")
    found = parse_rate(low), parse_rate(high)
    if not 0 < found[0] < found[1]:
        raise SettingsError(f"a sweep must rise from above 0; found {text!r}")
    return (name, *found)


def curves(job: Job, machine: Machine, option: Option, low: float, high: float, points: int = 25) -> list[Curve]:
    """Step times of stages 0 to 3 with the micro-batches of ``option`` over all ranks, whether they fit or not."""
    bandwidths = [low * (high / low) ** (i / (points - 1)) for i in range(points)]
    return [
        Curve(stage, [(b, _seconds(job, with_link(machine, b), option, stage)) for b in bandwidths])
        for stage in range(4)
    ]


def crossover(job: Job, machine: Machine, option: Option, low: float, high: float) -> float | None:
    """Bytes a second between ``low`` and ``high`` below which stage 3 hurts; None if it never or always does."""
    return _where(lambda b: _ratio(job, with_link(machine, b), option), low, high)


def thresholds(job: Job, machine: Machine, option: Option) -> list[Threshold]:
    """Where stage 3 begins to hurt: in bandwidth, latency, tokens a rank in a micro-batch, and model size."""
    link = machine.link if machine.nodes > 1 else machine.gpu.intra
    tokens = option.micro_batch * job.sequence

    def by_link(value: float) -> float:
        return _ratio(job, with_link(machine, value), option)

    def by_latency(value: float) -> float:
        return _ratio(job, replace(machine, latency=value), option)

    def by_tokens(value: float) -> float:
        # One sample of so many tokens; attention's share goes by the plan's own sequence.
        return _ratio(replace(job, sequence=max(1, round(value))), machine, replace(option, micro_batch=1))

    def by_size(value: float) -> float:
        return _ratio(replace(job, shape=from_count(value)), machine, option)

    def microseconds(value: float) -> str:
        return f"{value * 1e6:,.3g} µs"

    def whole(value: float) -> str:
        return f"{value:,.0f} tokens"

    own = float(job.shape.parameters)
    found = [
        Threshold("bandwidth", link, _where(by_link, link / 1e3, link * 1e3), "below", rate),
        Threshold("latency", machine.latency, _where(by_latency, 1e-8, 1e-1), "above", microseconds),
    ]
    if job.shape.transformer:
        found += [
            Threshold("tokens a rank in a micro-batch", tokens, _where(by_tokens, 16, 1e6), "below", whole),
            Threshold("parameters", own, _where(by_size, 1e7, 1e12), "below", count),
        ]
    return found


def _ratio(job: Job, machine: Machine, option: Option) -> float:
    return _seconds(job, machine, option, 3) / _seconds(job, machine, option, 2)


def _seconds(job: Job, machine: Machine, option: Option, stage: int) -> float:
    ranks = option.shard * option.replicate
    plain = replace(option, stage=stage, shard=ranks, replicate=1, offload="none")
    return estimate(job, machine, plain).seconds.total


def _where(ratio: Callable[[float], float], low: float, high: float) -> float | None:
    """Where ``ratio`` passes `HURTS` between ``low`` and ``high``, by bisection on a logarithmic scale."""
    if (ratio(low) > HURTS) == (ratio(high) > HURTS):
        return None
    hurts_low = ratio(low) > HURTS
    for _ in range(30):
        middle = math.sqrt(low * high)
        if (ratio(middle) > HURTS) == hurts_low:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
