"""Estimate: one way to train a model on a machine: what it holds in each phase, sends, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from onecopy.planner.available import missing
from onecopy.planner.buffers import pinned_bytes, with_overheads
from onecopy.planner.calibrated import HIDDEN_SHARE
from onecopy.planner.machine import Machine
from onecopy.planner.offload import cpu_step_seconds
from onecopy.planner.quantities import gigabytes
from onecopy.planner.shape import Checkpointing, Shape
from onecopy.planner.step import CATEGORIES, Phase, Schedule, Sizes, Unit, Widths, layout, step_bytes
from onecopy.planner.time import StepSeconds, overlap, step_flops
from onecopy.planner.traffic import step_elements
from onecopy.stage import Stage

Offload = Literal["none", "optimizer on cpu", "optimizer on nvme", "parameters on cpu", "parameters on nvme"]

OFFLOADS: Final[tuple[Offload, ...]] = (
    "none",
    "optimizer on cpu",
    "optimizer on nvme",
    "parameters on cpu",
    "parameters on nvme",
)

PROCESS_BYTES: Final = 2e9
"""Host memory of one rank's process without any model: Python, torch and its libraries. An assumption."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, however it is done.

    Attributes:
        shape: the model.
        sequence: tokens in a sample; 1 for models without.
        precision: "bf16", "bf16-lean", "fp16" or "fp32".
        implementation: of AdamW: "foreach", "fused" or "for-loop".
        tensor_parallel: ranks that share one model; for P_a.
    """

    shape: Shape
    sequence: int
    precision: str = "bf16"
    implementation: str = "foreach"
    tensor_parallel: int = 1

    @property
    def widths(self) -> Widths:
        return Widths.of(self.precision)


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        stage: 0 to 3.
        micro_batch: samples of one rank in one micro-batch.
        accumulate: micro-batches in a step.
        shard, replicate: N, and how often each slice is held.
        prefetch: units gathered ahead.
    """

    stage: int
    micro_batch: int
    accumulate: int
    checkpointing: Checkpointing
    offload: Offload
    shard: int
    replicate: int = 1
    prefetch: int = 1

    @property
    def missing(self) -> tuple[str, ...]:
        """What onecopy does not have yet of what this needs."""
        needs = [self.checkpointing] if self.checkpointing.startswith("P_a") else []
        return missing(needs + ([self.offload] if self.offload != "none" else []))

    def schedule(self, job: Job) -> Schedule:
        """What the engine does in a step of ``job``."""
        return Schedule(
            self.stage,
            self.shard,
            self.replicate,
            self.accumulate,
            self.prefetch,
            job.widths,
            implementation=job.implementation,
        )

    def words(self) -> str:
        """The option in one line."""
        parts = [f"stage {self.stage}", f"micro-batch {self.micro_batch} × {self.accumulate}"]
        if self.checkpointing != "off":
            parts.append(f"checkpointing {self.checkpointing}")
        if self.offload != "none":
            parts.append(self.offload)
        if self.replicate > 1 and Stage.of(self.stage).shards_optimizer:
            parts.append(f"{self.replicate} copies of {self.shard} ranks")
        return ", ".join(parts)


@dataclass(frozen=True)
class Estimate:
    """What an option costs.

    Attributes:
        peaks: bytes by category at the highest moment of each phase; "save" gathers whole fp32 parameters on the
            device, which slices do not need.
        limit: bytes of the device.
        host: bytes that the ranks of one node hold on the host.
        bytes_sent: of model states, by one rank in a step.
        seconds: of a step.
        tokens_per_second: of all ranks; samples where the model has no sequence.
        limited_by: what a step waits for longest.
    """

    option: Option
    peaks: dict[Phase, Sizes]
    limit: float
    host: float
    host_limit: float | None
    bytes_sent: float
    seconds: StepSeconds
    tokens_per_second: float
    limited_by: str

    @property
    def peak(self) -> float:
        """Bytes at the highest moment of a step; loading and saving can be done in other ways."""
        return max(sum(self.peaks[phase].values()) for phase in ("forward", "backward", "step") if phase in self.peaks)

    @property
    def peak_phase(self) -> Phase:
        phases: tuple[Phase, ...] = ("forward", "backward", "step")
        return max(phases, key=lambda phase: sum(self.peaks[phase].values()))

    @property
    def fits(self) -> bool:
        """Whether device and host hold it."""
        return self.peak <= self.limit and (self.host_limit is None or self.host <= self.host_limit)

    @property
    def available(self) -> bool:
        """Whether onecopy can do it today."""
        return not self.option.missing

    @property
    def loads_on_meta(self) -> bool:
        """Whether the whole model does not fit the device beside its slices, so that it must be built on meta."""
        return sum(self.peaks["load"].values()) > self.limit


def estimate(job: Job, machine: Machine, option: Option) -> Estimate:
    """What ``option`` costs for ``job`` on ``machine``.

    Raises:
        SettingsError: if there is no such stage.
    """
    units = job.shape.with_activations(
        option.micro_batch,
        job.sequence,
        option.checkpointing,
        model_parallel=job.tensor_parallel,
        element_bytes=job.widths.compute,
    )
    schedule = option.schedule(job)
    peaks: dict[Phase, Sizes] = {"load": _load(units, schedule)}
    peaks |= step_bytes(units, schedule)
    peaks["save"] = _save(units, schedule, peaks["step"])
    peaks = {phase: _with_overheads(_offloaded(sizes, option, schedule)) for phase, sizes in peaks.items()}
    seconds, sent = _seconds(job, machine, option, schedule, units)
    samples = machine.gpus * option.micro_batch * option.accumulate
    return Estimate(
        option,
        peaks,
        machine.gpu.memory,
        _host(job, machine, option, units),
        machine.host_memory,
        sent,
        seconds,
        samples * job.sequence / seconds.total,
        _limited_by(machine, option, seconds),
    )


def describe_peak(found: Estimate) -> str:
    """The highest moment in words."""
    return f"{gigabytes(found.peak)} of {gigabytes(found.limit)}, in {found.peak_phase}"


def _load(units: list[Unit], schedule: Schedule) -> Sizes:
    """The model as it was built, all slices, and one unit's flat copy: what `onecopy.shard` holds at its end."""
    master = schedule.widths.master
    layouts = [layout(unit, schedule) for unit in units if unit.numels]
    sizes = dict.fromkeys(CATEGORIES, 0.0)
    sizes["parameters_sliced"] = float(master * sum(one.slice_numel for one in layouts))
    sizes["parameters_gathered"] = float(master * max(one.padded_numel for one in layouts))
    sizes["other"] = float(master * sum(unit.parameters for unit in units))
    return sizes


def _save(units: list[Unit], schedule: Schedule, step: Sizes) -> Sizes:
    """Whole parameters in the master dtype inside of `onecopy.gathered`, on every rank."""
    whole = sum(layout(unit, schedule).padded_numel for unit in units if unit.numels)
    sizes = {**step, "optimizer_temporaries": 0.0, "gradients_sliced": 0.0}
    sizes["other"] = float(schedule.widths.master * whole)
    return sizes


def _offloaded(sizes: Sizes, option: Option, schedule: Schedule) -> Sizes:
    """Without what offloading moves to the host: optimizer states, masters and gradient slices, then parameters."""
    if option.offload == "none":
        return sizes
    sizes = {**sizes, "optimizer": 0.0, "optimizer_temporaries": 0.0, "gradients_sliced": 0.0}
    # At stage 3 slices in the compute dtype stay on the device, unless parameters are offloaded too.
    stays = Stage.of(option.stage).shards_parameters and not option.offload.startswith("parameters")
    share = schedule.widths.compute / schedule.widths.master if stays else 0.0
    sizes["parameters_sliced"] *= share
    return sizes


def _with_overheads(sizes: Sizes) -> Sizes:
    live = sum(sizes.values())
    return {**sizes, "other": sizes["other"] + with_overheads(live) - live}


def _host(job: Job, machine: Machine, option: Option, units: list[Unit]) -> float:
    """Processes, and what was offloaded; page-locked buffers are rounded up as torch does."""
    each = PROCESS_BYTES
    own = sum(unit.parameters for unit in units) / _slices(option)
    widths = job.widths
    if option.offload != "none":
        # Gradients come down and parameters go up through page-locked memory.
        each += 2 * pinned_bytes(widths.compute * own)
        if option.offload.endswith("cpu"):
            each += 3 * widths.master * own
        if option.offload == "parameters on cpu":
            each += pinned_bytes(widths.compute * own)
    if option.checkpointing == "P_a+cpu":
        off = job.shape.with_activations(option.micro_batch, job.sequence, "P_a", model_parallel=job.tensor_parallel)
        each += pinned_bytes(sum(unit.activations for unit in off))
    return each * machine.per_node


def _slices(option: Option) -> int:
    return option.shard if Stage.of(option.stage).shards_optimizer else 1


def _seconds(
    job: Job, machine: Machine, option: Option, schedule: Schedule, units: list[Unit]
) -> tuple[StepSeconds, float]:
    tokens = option.micro_batch * option.accumulate * job.sequence
    sizes = job.shape.transformer
    recompute = option.checkpointing != "off"
    operations = step_flops(
        job.shape.parameters,
        tokens,
        recompute=recompute,
        layers=sizes.layers if sizes else 0,
        hidden=sizes.hidden if sizes else 0,
        sequence=job.sequence if sizes else 0,
    )
    # A 32-bit product takes twice the time of a 16-bit one at the least.
    compute = operations / machine.flops(sizes.hidden if sizes else None) * (2 if job.precision == "fp32" else 1)
    widths = job.widths
    padded = [layout(unit, schedule).padded_numel for unit in units if unit.numels]
    shard, replicate = (option.shard, option.replicate) if _slices(option) > 1 else (machine.gpus, 1)
    found = overlap(
        option.stage,
        [(widths.compute * numel, widths.reduce * numel) for numel in padded],
        compute,
        shard=shard,
        replicate=replicate,
        micro_batches=option.accumulate,
        link=machine.shard_link(shard),
        replicate_link=machine.replicate_link(shard),
        recompute=recompute,
        hidden_share=HIDDEN_SHARE,
    )
    elements = step_elements(option.stage, sum(padded), option.shard, option.accumulate, option.replicate)
    sent = elements.all_gather * widths.compute + (elements.reduce_scatter + elements.all_reduce) * widths.reduce
    own = sum(padded) / _slices(option)
    update, transfer = _update_seconds(job, machine, option, own, compute)
    return found._replace(update=update, transfer=transfer), sent


def _update_seconds(job: Job, machine: Machine, option: Option, own: float, compute: float) -> tuple[float, float]:
    """Seconds of the optimizer's step, and of transfers that do not hide."""
    widths = job.widths
    if option.offload == "none":
        return own * 7 * widths.master / machine.gpu.memory_bandwidth, 0.0
    up = widths.compute * own / machine.gpu.host
    down = max(0.0, widths.compute * own / machine.gpu.host - compute / 2)
    transfer = up + down
    update = cpu_step_seconds(own, machine.host_bandwidth / machine.per_node)
    if option.offload.endswith("nvme"):
        # Reads and writes of three fp32 states.
        transfer += 6 * widths.master * own * machine.per_node / machine.nvme_bandwidth
    if option.offload.startswith("parameters"):
        fetched = 2 * widths.compute * own * option.accumulate / machine.gpu.host
        transfer += max(0.0, fetched - compute)
    return update, transfer


def _limited_by(machine: Machine, option: Option, seconds: StepSeconds) -> str:
    shard = option.shard if _slices(option) > 1 else machine.gpus
    parts = {
        "computing": seconds.compute,
        machine.named_link(shard): seconds.exposed,
        "the optimizer's step": seconds.update,
        "the link to the host": seconds.transfer,
    }
    return max(parts, key=lambda name: parts[name])
