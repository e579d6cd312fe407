"""Work: what a step computes, where, and how many of them; and a system that does it with its own copy of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.systems import Settings, System, Trainer
from trained.cases import CASES, DTYPES, Batch


@dataclass(frozen=True)
class Work:
    """What a step computes, where, and how many of them.

    Attributes:
        samples, size: of one rank in one micro-batch, see `cases.Case`.
        threads: of each rank.
    """

    case: str
    precision: str
    micro_batches: int
    ranks: int
    samples: int
    size: int
    steps: int
    warmup: int
    threads: int = 1

    def __str__(self) -> str:
        return (
            f"{self.case}, {self.ranks} ranks, {self.precision}, g = {self.micro_batches}, "
            f"{self.samples} samples of {self.size} a rank"
        )

    @property
    def tolerance(self) -> float:
        """The share by which losses may differ."""
        return CASES[self.case].tolerance if self.precision == "fp32" else 3e-2


class Entrant:
    """A system with its own copy of the model and its own, equal, stream of data.

    Args:
        small: of the model's repeated parts only the first, where the case has such a model.
    """

    def __init__(self, system: System, work: Work, rank: int, small: bool = False) -> None:
        case, settings = CASES[work.case], Settings(work.precision, work.micro_batches)
        torch.manual_seed(0)
        self._case, self._work = case, work
        self._generator = torch.Generator().manual_seed(rank)
        build = (case.small or case.build) if small else case.build
        self.trainer: Trainer = system.set_up(build(), settings)

    def batches(self) -> list[Batch]:
        work = self._work
        drawn = [self._case.draw(self._generator, work.samples, work.size) for _ in range(work.micro_batches)]
        dtype = DTYPES[work.precision]
        return [tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in drawn]
