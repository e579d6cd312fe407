"""Expectation: what the planner says of a candidate: seconds of a step and bytes of a rank, with corrected constants.

Units, activations and operations come from one run of the model on fake tensors for each size of units. The formulas
are the planner's own; what it has a constant for is a factor of `Calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, NamedTuple

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import Job, load_bytes, local_units, offloaded, step_seconds
from onecopy.planner.engine.simulate import describe_units
from onecopy.planner.engine.step import step_bytes
from onecopy.planner.engine.work import count_work
from onecopy.planner.machine.calibration import Calibration
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import Phase, Schedule, Sizes, Unit
from onecopy.planner.model.shape import Shape, Work
from onecopy.planner.quantities import seconds
from onecopy.recipes.sharded import units_of
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.workload import Workload

_ACTIVATIONS: Final = ("activations", "logits")

OVERHEAD: Final = 2e-3
"""Seconds of one micro-batch that no constant of the machine stands for, before anything is measured. An assumption."""

_UNKNOWN_TOKENS: Final = 128
"""Tokens of a sample where its operations could not be counted. An assumption that the first probe corrects."""


class Held(NamedTuple):
    """Bytes of tensors at the highest moment of one phase.

    Attributes:
        states: all but activations.
        activations: what autograd keeps, and logits.
    """

    states: float
    activations: float


@dataclass(frozen=True)
class _Model:
    """The workload as the planner sees it with units of one size.

    Attributes:
        measured: activations as counted on fake tensors.
        spread: sizes of a transformer instead, where its blocks are cut over tensor ranks; None for other models.
    """

    measured: Job
    spread: Job | None


class Expectation:
    """What the planner says of a workload's candidates.

    Attributes:
        machine: what probes run on, before any correction.
        notes: what could not be planned, a line each.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.machine = machine
        self.notes: list[str] = []
        self._workload = workload
        self._models: dict[str, _Model] = {}
        self._held = lru_cache(maxsize=None)(self._count)
        self._told = lru_cache(maxsize=None)(self._schedule)

    def seconds(self, candidate: Candidate, calibration: Calibration) -> float:
        """Of one step."""
        return sum(self._parts(candidate, calibration).values())

    @property
    def tokens(self) -> int | None:
        """Of a sample; None where samples have none, or nothing was planned yet."""
        found = next(iter(self._models.values()), None)
        work = None if found is None else found.measured.shape.work
        return None if work is None else work.tokens

    def why_slower(self, this: Candidate, other: Candidate, calibration: Calibration) -> str:
        """Which part of a step takes ``this`` longer than ``other``, by the planner; "" if none does."""
        mine, others = self._parts(this, calibration), self._parts(other, calibration)
        name = max(mine, key=lambda part: mine[part] - others[part])
        more = mine[name] - others[name]
        return f"{name} takes {seconds(more)} longer, by the planner" if more > 0.005 * sum(others.values()) else ""

    def _parts(self, candidate: Candidate, calibration: Calibration) -> dict[str, float]:
        job, schedule, units = self._told(candidate)
        machine = calibration.applied(replace(self.machine, gpus=candidate.ranks))
        found, _ = step_seconds(job, machine, candidate.option(), schedule, units)
        return {
            "computing": found.compute,
            "waiting for messages": found.exposed + found.tensor,
            "the optimizer's step": found.update,
            "moving states": found.transfer,
            "starting micro-batches": (calibration.overhead or OVERHEAD) * candidate.accumulate,
        }

    def phases(self, candidate: Candidate) -> dict[Phase, Held]:
        """Bytes of tensors in load, forward, backward and step."""
        return self._held(candidate)

    def memory(self, candidate: Candidate, calibration: Calibration) -> float:
        """The most bytes that a rank's process holds, or of the device on an accelerator."""
        highest = max(
            calibration.states * held.states + calibration.activations * held.activations
            for held in self._held(candidate).values()
        )
        return calibration.base + highest

    def sure_to_need_more(self, this: Candidate, other: Candidate) -> bool:
        """Whether no phase of ``this`` holds less than the same of ``other``, by the planner."""
        mine, others = self._held(this), self._held(other)
        return all(sum(mine[phase]) >= sum(others[phase]) for phase in others)

    def _model(self, units: str) -> _Model:
        if units not in self._models:
            self._models[units] = self._describe(units)
        return self._models[units]

    def _describe(self, units: str) -> _Model:
        workload = self._workload
        describe = partial(describe_units, workload.build, units=units_of(units))
        work: Work | None = None
        try:
            found = describe(partial(workload.batch, 1))
            work = count_work(workload.build, partial(workload.batch, 1))
        except SettingsError:
            # Of the user's own functions, and said in a sentence.
            raise
        except Exception as error:
            # A model may look at values, which fake tensors have not: then probes must tell.
            self.notes.append(f"activations and operations are not planned: {type(error).__name__}: {error}"[:300])
            found = describe(None)
        work = work or _guess(found)
        precision = workload.precision or "fp32"
        shape = Shape(workload.name, tuple(found), None, work)
        measured = Job(shape, work.tokens or 1, precision, workload.implementation)
        if (sizes := workload.transformer) is None:
            return _Model(measured, None)
        return _Model(measured, replace(measured, shape=replace(shape, transformer=sizes)))

    def _schedule(self, candidate: Candidate) -> tuple[Job, Schedule, list[Unit]]:
        model = self._model(candidate.units)
        job = model.measured if candidate.tensor == 1 or model.spread is None else model.spread
        option = candidate.option()
        schedule = replace(
            option.schedule(job),
            native=not self.machine.computes_on_host,
            bucket_bytes=candidate.bucket_bytes or None,
        )
        return job, schedule, local_units(job, option)

    def _count(self, candidate: Candidate) -> dict[Phase, Held]:
        job, schedule, units = self._told(candidate)
        option = candidate.option()
        peaks: dict[Phase, Sizes] = {"load": load_bytes(job.shape, units, schedule)}
        peaks |= step_bytes(units, schedule)
        return {phase: _split(offloaded(sizes, option, schedule)) for phase, sizes in peaks.items()}


def _split(sizes: Sizes) -> Held:
    activations = sum(sizes.get(name, 0.0) for name in _ACTIVATIONS)
    return Held(sum(sizes.values()) - activations, activations)


def _guess(units: list[Unit]) -> Work:
    """Operations of a sample that could not be counted: two for each parameter and token, twice that in backward."""
    forward = 2.0 * sum(unit.all_parameters for unit in units) * _UNKNOWN_TOKENS
    return Work(forward, 2 * forward, None)
