"""Tuned: what a search has found: the best setting, the runner-up and why it lost, every probe, and what to paste."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from onecopy.planner.machine.calibration import Calibration
from onecopy.planner.quantities import gigabytes
from onecopy.stage import Stage
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.outcome import Outcome
from onecopy.tuner.search import Objective
from onecopy.tuner.workload import activations_of, offload_of


@dataclass(frozen=True)
class Probe:
    """One setting that was tried.

    Attributes:
        planned_seconds, planned_bytes: what the planner said before anything was measured.
        expected_seconds, expected_bytes: what it says with this machine's constants.
    """

    candidate: Candidate
    outcome: Outcome
    planned_seconds: float
    planned_bytes: float
    expected_seconds: float
    expected_bytes: float

    def as_dict(self) -> dict[str, Any]:
        timed = self.outcome.timed
        return {
            "setting": self.candidate.words(),
            "candidate": self.candidate.as_dict(),
            "seconds": timed.seconds if timed else None,
            "spread": timed.spread if timed else None,
            "samples_per_second": self.candidate.samples / timed.seconds if timed else None,
            "planned": {"seconds": self.planned_seconds, "bytes": self.planned_bytes},
            "expected": {"seconds": self.expected_seconds, "bytes": self.expected_bytes},
            "outcome": self.outcome.as_dict(),
        }


@dataclass(frozen=True)
class Tuned:
    """The outcome of `onecopy.tune`.

    Attributes:
        name: of what was tuned.
        objective: what the best is best in.
        probes: every setting that was tried, the best measured ones first.
        best, runner_up: None where nothing, or nothing else, could be measured.
        reason: why the best is the best, and why the runner-up lost.
        ended: why the search ended.
        interrupted: whether it was ended from outside, so that the same call goes on.
        candidates: settings in the space.
        left_out: of these, those that need more than a setting that ran out of memory.
        limit: bytes that a rank was allowed.
        ranks, global_batch: as tuned.
        tokens: of a sample; None where samples have none.
        calibration: the constants of this machine as measured.
        precision, states: see `shard_arguments`.
        config: TOML of what `onecopy train` is to be told; None for a loop of one's own.
        machine: in words.
        notes: what could not be planned.
    """

    name: str
    objective: Objective
    probes: list[Probe]
    best: Probe | None
    runner_up: Probe | None
    reason: str
    ended: str
    interrupted: bool
    candidates: int
    left_out: int
    limit: int | None
    ranks: int
    global_batch: int
    tokens: int | None
    calibration: Calibration
    precision: str | None
    states: str
    config: str | None
    machine: str
    notes: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """What to give to `onecopy.shard` beside the model, but for a mesh.

        Raises:
            ValueError: if nothing could be measured.
        """
        if self.best is None:
            raise ValueError(f"nothing was found: {self.ended}")
        chosen = self.best.candidate
        found: dict[str, Any] = {"stage": chosen.stage, "precision": self.precision, "accumulate": chosen.accumulate}
        found["prefetch"] = chosen.prefetch
        if chosen.units != "auto":
            found["units"] = [] if chosen.units == "one" else chosen.units.split(",")
        if chosen.bucket_bytes:
            found["bucket_bytes"] = chosen.bucket_bytes
        if (activations := activations_of(chosen)) is not None:
            found["activations"] = activations
        if (offload := offload_of(chosen, self.states)) is not None:
            found["offload"] = offload
        return found

    @property
    def shard_call(self) -> str:
        """The same as Python to paste, with the mesh where one is needed."""
        given = self.arguments
        assert self.best is not None
        chosen = self.best.candidate
        lines = []
        axes = {"shard": chosen.shard}
        if chosen.replicate > 1 and Stage.of(chosen.stage).shards_optimizer:
            axes = {"replicate": chosen.replicate} | axes
        if chosen.tensor > 1:
            axes |= {"tensor": chosen.tensor}
            lines.append('parallelize(model, mesh["tensor"])  # from onecopy.recipes.tensor_parallel')
        if len(axes) > 1:
            sizes, names = ", ".join(map(str, axes.values())), ", ".join(f'"{name}"' for name in axes)
            lines.insert(0, f"mesh = torch.distributed.init_device_mesh(device, ({sizes}), mesh_dim_names=({names}))")
            given = given | {"mesh": None}
        parts = [f"{name}={_code(name, value)}" for name, value in given.items() if value is not None or name == "mesh"]
        lines.append(f"model = onecopy.shard(model, {', '.join(parts)})")
        lines.append(f"# {chosen.micro_batch} samples of a rank at once, {chosen.accumulate} micro-batches a step")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All of it for programs: seconds, bytes, samples a second."""
        return {
            "name": self.name,
            "objective": self.objective,
            "ranks": self.ranks,
            "global_batch": self.global_batch,
            "limit": self.limit,
            "reason": self.reason,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "candidates": self.candidates,
            "left_out": self.left_out,
            "best": self.best.as_dict() if self.best else None,
            "runner_up": self.runner_up.as_dict() if self.runner_up else None,
            "shard_call": self.shard_call if self.best else None,
            "config": self.config,
            "calibration": self.calibration.__dict__,
            "machine": self.machine,
            "notes": list(self.notes),
            "probes": [probe.as_dict() for probe in self.probes],
        }

    def speed(self, probe: Probe) -> str:
        """Of a measured probe, in words."""
        timed = probe.outcome.timed
        assert timed is not None
        samples = probe.candidate.samples / timed.seconds
        return f"{samples * self.tokens:,.0f} tokens/s" if self.tokens else f"{samples:,.1f} samples/s"

    def errors(self) -> dict[str, tuple[float, float]]:
        """The planner's median error on what was measured, before and after calibration, of "time" and "memory"."""
        timed = [(probe, probe.outcome.timed) for probe in self.probes if probe.outcome.timed]
        pairs = {
            "time": [(p.planned_seconds / t.seconds, p.expected_seconds / t.seconds) for p, t in timed if t],
            "memory": [
                (p.planned_bytes / p.outcome.peak, p.expected_bytes / p.outcome.peak)
                for p, _ in timed
                if p.outcome.peak
            ],
        }
        return {
            name: (median([abs(before - 1) for before, _ in found]), median([abs(after - 1) for _, after in found]))
            for name, found in pairs.items()
            if found
        }


def _code(name: str, value: Any) -> str:
    if name == "mesh":
        return "mesh"
    if name == "activations":
        given = [] if value.checkpoint == "units" else [f'"{value.checkpoint}"']
        given += [] if value.partition else ["partition=False"]
        given += [] if value.offload is None else ['offload="cpu"']
        return f"onecopy.Activations({', '.join(given)})"
    if name == "offload":
        places = [f'optimizer="{value.optimizer}"']
        if value.parameters is not None:
            places += [f'parameters="{value.parameters}"', f"prefetch={value.prefetch}"]
        return f"onecopy.Offload({', '.join(places)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def compared(best: Probe, other: Probe, objective: Objective, noise: float, why: str) -> str:
    """Why ``other`` lost, in a sentence.

    Args:
        noise: share by which measured seconds may be off.
        why: what the planner says takes it longer.
    """
    first, second = best.outcome.timed, other.outcome.timed
    assert first is not None
    assert second is not None
    slower = second.seconds / first.seconds - 1
    more = other.outcome.peak - best.outcome.peak
    speed = (
        "as fast within the noise"
        if abs(slower) <= noise
        else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    )
    memory = f"{gigabytes(abs(more))} {'more' if more > 0 else 'less'}"
    memory = "as much" if abs(more) < 0.01 * best.outcome.peak else memory
    reason = f": {why}" if why and slower > noise else ""
    aim = " Memory was to be small." if objective == "memory" else ""
    return f"The runner-up, {other.candidate.words()}, is {speed}{reason}, and holds {memory}.{aim}"
