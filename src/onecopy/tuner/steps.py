"""Steps: what the seconds of a probe's steps say: warm-up told apart, the median, and how far it may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple

_SETTLED: Final = 1.25
"""A leading step that takes this many times the median of those after it still belongs to the warm-up."""

_LEAST: Final = 2
"""Steps that are left at the least."""


class Timed(NamedTuple):
    """Seconds of a step.

    Attributes:
        seconds: the median after warm-up.
        spread: half of the middle half's width, as a share of the median.
        error: standard error of the median, as a share of it.
        warmup: leading steps that were left out.
    """

    seconds: float
    spread: float
    error: float
    warmup: int


def settle(steps: Sequence[float]) -> Timed:
    """The steps in short.

    The first step makes the optimizer's states and all buffers, and is always warm-up. Later ones are as long as they
    take `_SETTLED` times the median of the rest.

    Args:
        steps: seconds of each, at least two.
    """
    warmup = 1
    while len(steps) - warmup > _LEAST and steps[warmup] > _SETTLED * median(steps[warmup + 1 :]):
        warmup += 1
    kept = list(steps[warmup:])
    middle = median(kept)
    low, _, high = quantiles(kept, n=4, method="inclusive") if len(kept) > 1 else (middle, middle, middle)
    spread = (high - low) / 2 / middle
    # Of a normal distribution half the middle half's width is 0.674 sigma, and a median's error 1.253 sigma / sqrt(n).
    return Timed(middle, spread, 1.253 * spread / 0.674 / math.sqrt(len(kept)), warmup)
