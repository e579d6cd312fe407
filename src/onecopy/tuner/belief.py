"""Belief: what is expected of settings that were not tried, after those that were: the planner, corrected.

One Gaussian process in the logarithm of seconds (or bytes). Its mean is the planner's formula g(θ, x), whose constants
θ are unknown factors with a log-normal prior; what the formula does not know is a second, short-ranged term r(x), alike
for settings that are alike:

    y(x) = g(θ, x) + r(x) + noise        θ ~ N(0, S)        r ~ GP(0, R)

With J = ∂g/∂θ at the current θ, A = J S Jᵀ + R + noise and y' = y - g(θ) + Jθ, Gauss-Newton's next θ is S Jᵀ A⁻¹ y'.
Where it stands still the mean at x is g(θ, x) + R(x, ·) A⁻¹ y'. How large r is, the measurements say too: of a few
sizes the one with the largest evidence is taken. (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7:
explicit basis functions; 5.4: evidence.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from onecopy.tuner.candidate import Candidate

Formula = Callable[[Candidate, Sequence[float]], float]
"""The logarithm of what is expected of a candidate, given θ."""

_STEP: Final = 1e-3
"""Of the derivative by θ."""

_ROUNDS: Final = 6

_SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the formula's error, as multiples of what it is taken for before anything is measured."""

_SIZES_PRIOR: Final = 0.7
"""Standard deviation of the logarithm of such a multiple."""


class Point(NamedTuple):
    """One measurement: the logarithm of a value, and its standard error."""

    candidate: Candidate
    value: float
    error: float


class Expected(NamedTuple):
    """Of one candidate, in logarithms."""

    mean: float
    sd: float


class _Fit(NamedTuple):
    """The process for one size of the formula's error."""

    size: float
    evidence: float
    theta: list[float]
    solved: Tensor
    inverse: Tensor
    jacobian: Tensor


class Belief:
    """The process, for one quantity.

    Args:
        formula: g.
        prior: standard deviations of θ, whose mean is 0.
        unknown: standard deviation of what the formula does not know, before measurements say more.

    Attributes:
        theta: the constants as they are believed to be.
    """

    def __init__(self, formula: Formula, prior: Sequence[float], unknown: float) -> None:
        self.theta = [0.0] * len(prior)
        self._formula = formula
        self._prior = torch.diag(torch.tensor(prior, dtype=torch.float64) ** 2)
        self._unknown = unknown
        self._size = 1.0
        self._points: list[Point] = []
        self._solved = torch.zeros(0, dtype=torch.float64)
        self._inverse = torch.zeros(0, 0, dtype=torch.float64)
        self._jacobian = torch.zeros(0, len(prior), dtype=torch.float64)

    def learn(self, points: Sequence[Point]) -> None:
        """Believe what was measured; nothing of what was learnt before is kept but the starting point."""
        self._points = list(points)
        if not points:
            return
        fits = [self._fit(size) for size in _SIZES]
        best = max(fits, key=lambda fit: fit.evidence)
        self.theta, self._size = best.theta, best.size
        self._solved, self._inverse, self._jacobian = best.solved, best.inverse, best.jacobian

    def _fit(self, size: float) -> _Fit:
        """The constants if the formula's error has such a size."""
        candidates = [point.candidate for point in self._points]
        values = _vector([point.value for point in self._points])
        noise = torch.diag(_vector([point.error**2 for point in self._points]))
        unknown = self._alike(candidates, candidates, size) + noise
        # From where it was before, it is near.
        theta = _vector(self.theta)
        for _ in range(_ROUNDS):
            here, jacobian = self._derivative(candidates, theta.tolist())
            left = values - here + jacobian @ theta
            covariance = jacobian @ self._prior @ jacobian.T + unknown
            inverse = torch.linalg.inv(covariance)
            solved = inverse @ left
            new = self._prior @ jacobian.T @ solved
            # The formula bends where messages begin to hide: no more than a factor of e at once.
            moved = (new - theta).clamp(-1.0, 1.0)
            theta = theta + moved
            if float(moved.abs().max()) < 1e-3:
                break
        evidence = -0.5 * float(left @ solved + torch.logdet(covariance))
        evidence -= 0.5 * (math.log(size) / _SIZES_PRIOR) ** 2
        return _Fit(size, evidence, theta.tolist(), solved, inverse, jacobian)

    def at(self, candidates: Sequence[Candidate]) -> list[Expected]:
        """What is expected of each."""
        means, jacobian = self._derivative(candidates, self.theta)
        prior = ((jacobian @ self._prior) * jacobian).sum(1) + (self._size * self._unknown) ** 2
        if self._points:
            alike = self._alike(candidates, [point.candidate for point in self._points], self._size)
            means = means + alike @ self._solved
            shared = jacobian @ self._prior @ self._jacobian.T + alike
            prior = prior - ((shared @ self._inverse) * shared).sum(1)
        return [Expected(m, math.sqrt(max(0.0, v))) for m, v in zip(means.tolist(), prior.tolist(), strict=True)]

    def _derivative(self, candidates: Sequence[Candidate], theta: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The formula's values, and their derivatives by θ, a row for each candidate."""
        here = [self._formula(one, theta) for one in candidates]
        columns = []
        for k in range(len(theta)):
            moved = [value + _STEP * (i == k) for i, value in enumerate(theta)]
            there = [self._formula(one, moved) for one in candidates]
            columns.append([(after - before) / _STEP for before, after in zip(here, there, strict=True)])
        return _vector(here), torch.tensor(columns, dtype=torch.float64).mT

    def _alike(self, some: Sequence[Candidate], others: Sequence[Candidate], size: float) -> Tensor:
        return (size * self._unknown) ** 2 * torch.tensor(
            [[math.exp(-distance(one, other)) for other in others] for one in some], dtype=torch.float64
        ).reshape(len(some), len(others))


def distance(one: Candidate, other: Candidate) -> float:
    """How different two settings are in what the planner's formulas do not know; 0 for the same.

    The weights are assumptions: a change of what is computed or where states rest counts for more than one of how many
    are gathered ahead.
    """
    return (
        0.5 * (one.stage != other.stage)
        + 0.25 * abs(math.log2(one.micro_batch / other.micro_batch))
        + 0.5 * (one.checkpointing != other.checkpointing)
        + 1.0 * (one.offload != other.offload)
        + 0.7 * (one.tensor != other.tensor)
        + 0.3 * (one.replicate != other.replicate)
        + 0.15 * (one.prefetch != other.prefetch)
        + 0.15 * (one.bucket_bytes != other.bucket_bytes)
        + 0.3 * (one.units != other.units)
        + 0.5 * (one.ranks != other.ranks)
    )


def below(expected: Expected, limit: float) -> float:
    """The probability of a value below ``limit`` (in logarithms)."""
    return 0.5 * math.erfc((expected.mean - limit) / max(expected.sd, 1e-9) / math.sqrt(2))


def improvement(expected: Expected, best: float) -> float:
    """By how much a value is expected to be below ``best``, where it is (Mockus' expected improvement)."""
    sd = max(expected.sd, 1e-9)
    z = (best - expected.mean) / sd
    return sd * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
