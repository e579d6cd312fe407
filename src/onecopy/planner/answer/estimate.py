"""Estimate: one way to train a model on a machine: what it holds in each phase, sends, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Final, Literal

from onecopy.planner.available import missing
from onecopy.planner.engine.step import step_bytes
from onecopy.planner.formulas.activations import LOSS_BYTES, block_parallel_elements
from onecopy.planner.formulas.buffers import PREFETCH_BYTES, pinned_bytes, with_overheads
from onecopy.planner.formulas.calibrated import HIDDEN_SHARE, LAUNCH, TENSOR_LAUNCH
from onecopy.planner.formulas.offload import cpu_step_seconds
from onecopy.planner.formulas.time import (
    StepSeconds,
    all_reduce_seconds,
    gather_seconds,
    overlap,
    repeated_traffic,
    step_flops,
)
from onecopy.planner.formulas.traffic import step_elements
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import CATEGORIES, Phase, Schedule, Sizes, Unit, Widths, padded_numels
from onecopy.planner.model.shape import Checkpointing, Shape, Work, is_block, kept_bytes
from onecopy.planner.model.tensor import cut
from onecopy.planner.model.whole import Balance, balance, newton_schulz_operations, states_of_muon
from onecopy.planner.quantities import gigabytes
from onecopy.stage import Stage

Offload = Literal["none", "optimizer on cpu", "optimizer on nvme", "parameters on cpu", "parameters on nvme"]

_SLOTS: Final = 3
"""Units in memory while an optimizer steps over states on disk, as the engine has it."""

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
        implementation: of AdamW: "foreach", "fused" or "for-loop"; or "muon": that over the matrices of hidden layers,
            each whole on one rank, and AdamW fused over the rest.
        loss_bytes: temporaries of the loss for each logit; None for a loss that is made in chunks.
    """

    shape: Shape
    sequence: int
    precision: str = "bf16"
    implementation: str = "fused"
    loss_bytes: float | None = LOSS_BYTES

    @property
    def widths(self) -> Widths:
        return Widths.of(self.precision)

    @property
    def optimizer_tensors(self) -> float:
        """States of the optimizer for each parameter that is trained."""
        trained = sum(unit.parameters for unit in self.shape.units)
        return states_of_muon(self.shape.matrices, trained) if self.implementation == "muon" else 2.0

    def balance(self, ranks: int) -> Balance:
        """How Muon's matrices lie on so many ranks."""
        trained = sum(unit.parameters for unit in self.shape.units)
        return balance(self.shape.matrices, trained - sum(map(prod, self.shape.matrices)), ranks)


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        stage: 0 to 3.
        micro_batch: samples of one rank in one micro-batch.
        accumulate: micro-batches in a step.
        shard, replicate: N, and how often each slice is held.
        prefetch: units gathered ahead.
        tensor: M, ranks that share each sample and each block.
        sequence: what stands between blocks is cut over them along the sequence, embedding and head along the
            vocabulary.
    """

    stage: int
    micro_batch: int
    accumulate: int
    checkpointing: Checkpointing
    offload: Offload
    shard: int
    replicate: int = 1
    prefetch: int = 1
    tensor: int = 1
    sequence: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What onecopy does not have yet of what this needs."""
        needs: list[str] = [] if self.checkpointing in ("off", "selective", "units") else [self.checkpointing]
        needs += ["tensor parallelism"] if self.tensor > 1 else []
        return missing(needs + ([self.offload] if self.offload != "none" else []))

    @property
    def kind(self) -> tuple[object, ...]:
        """What options of one kind share; they differ in micro-batches and in M."""
        return (self.stage, self.checkpointing, self.offload, self.replicate)

    def schedule(self, job: Job) -> Schedule:
        """What the engine does in a step of ``job``."""
        return Schedule(
            self.stage,
            self.shard,
            self.replicate,
            self.accumulate,
            self.prefetch,
            job.widths,
            optimizer_tensors=job.optimizer_tensors,
            implementation="fused" if job.implementation == "muon" else job.implementation,
            prefetch_bytes=0 if self.offload.startswith("parameters") else PREFETCH_BYTES,
        )

    def words(self) -> str:
        """The option in one line."""
        parts = [f"stage {self.stage}", f"micro-batch {self.micro_batch} × {self.accumulate}"]
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}{' along the sequence' if self.sequence else ''}")
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
        activations_sent: bytes that tensor parallelism and P_a send on top, likewise.
        seconds: of a step.
        tokens_per_second: of all ranks; samples where the model has no sequence.
        limited_by: what a step waits for longest.
        rate: what is counted a second, "tokens" or "samples"; "" where the time of computing is not known, and seconds
            and speed are good for nothing but an order.
    """

    option: Option
    peaks: dict[Phase, Sizes]
    limit: float
    host: float
    host_limit: float | None
    bytes_sent: float
    activations_sent: float
    seconds: StepSeconds
    tokens_per_second: float
    limited_by: str
    rate: str = "tokens"

    @property
    def speed(self) -> str:
        """In words."""
        return f"{self.tokens_per_second:,.0f} {self.rate}/s" if self.rate else "time unknown"

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
    schedule = option.schedule(job)
    units, peaks = _held(job, replace(option, offload="none"))
    peaks = {phase: _with_overheads(offloaded(sizes, option, schedule), machine) for phase, sizes in peaks.items()}
    seconds, sent = step_seconds(job, machine, option, schedule, units)
    samples = machine.gpus // option.tensor * option.micro_batch * option.accumulate
    return Estimate(
        option,
        peaks,
        machine.gpu.memory,
        _host(job, machine, option, units),
        machine.host_limit,
        sent,
        activations_sent(job, option),
        seconds,
        samples * job.sequence / seconds.total,
        _limited_by(machine, option, seconds),
        job.shape.rate if job.shape.timed else "",
    )


@lru_cache(maxsize=16)
def _held(job: Job, option: Option) -> tuple[list[Unit], dict[Phase, Sizes]]:
    """The units as one rank holds them, and bytes by phase, nothing offloaded; options differ in that one by one."""
    units, schedule = local_units(job, option), option.schedule(job)
    peaks: dict[Phase, Sizes] = {"load": load_bytes(job.shape, units, schedule)}
    peaks |= step_bytes(units, schedule)
    peaks["save"] = _save(units, schedule, peaks["step"])
    return units, peaks


def least_bytes(job: Job, option: Option) -> float:
    """Bytes that a device holds at the least when the optimizer steps: model states alone, in closed form.

    A search leaves out at once what does not fit by this bound: `estimate` goes through every unit.
    """
    widths = job.widths
    trained = job.shape.trained / option.tensor / _slices(option)
    each = float((1 + job.optimizer_tensors) * widths.master + widths.gradient)
    if option.offload != "none":
        each = 0.0 if option.offload.startswith("parameters") else float(widths.compute)
    return with_overheads(each * trained)


def local_units(job: Job, option: Option) -> list[Unit]:
    """The units as one rank holds them, with what they keep for backward."""
    sizes = job.shape.transformer
    units = job.shape.with_activations(
        option.micro_batch,
        job.sequence,
        option.checkpointing,
        tensor=option.tensor,
        along_sequence=option.sequence,
        element_bytes=job.widths.compute,
        loss_bytes=job.loss_bytes,
    )
    return units if sizes is None else cut(units, sizes.hidden, option.tensor, ends=option.sequence)


def activations_sent(job: Job, option: Option) -> float:
    """Bytes of activations that a rank sends to those that share its samples, in a step (ZeRO §8)."""
    sizes = job.shape.transformer
    if sizes is None or option.tensor == 1:
        return 0.0
    elements = block_parallel_elements(
        option.micro_batch,
        job.sequence,
        sizes.hidden,
        recompute=option.checkpointing != "off",
        partitioned=option.checkpointing.startswith("P_a"),
        early_stop=True,
    )
    share = (option.tensor - 1) / option.tensor
    return elements * share * job.widths.compute * sizes.layers * option.accumulate


def describe_peak(found: Estimate) -> str:
    """The highest moment in words."""
    return f"{gigabytes(found.peak)} of {gigabytes(found.limit)}, in {found.peak_phase}"


def load_bytes(shape: Shape, units: list[Unit], schedule: Schedule) -> Sizes:
    """The model as it was built, all slices, and one unit's flat copy: what `onecopy.shard` holds at its end.

    Of a model that is cut over tensor ranks, the whole of it before that, where that is more.
    """
    master = schedule.widths.master
    padded = [sum(padded_numels(unit, schedule)) for unit in units]
    sizes = dict.fromkeys(CATEGORIES, 0.0)
    sizes["parameters_sliced"] = float(master * sum(padded) / schedule.slices)
    sizes["parameters_gathered"] = float(master * max(padded))
    sizes["other"] = float(master * sum(unit.all_parameters for unit in units))
    whole = float(master * shape.parameters)
    return sizes if sum(sizes.values()) >= whole else dict.fromkeys(CATEGORIES, 0.0) | {"other": whole}


def _save(units: list[Unit], schedule: Schedule, step: Sizes) -> Sizes:
    """Whole parameters in the master dtype inside of `onecopy.gathered`, on every rank."""
    whole = sum(sum(padded_numels(unit, schedule)) for unit in units)
    sizes = {**step, "optimizer_temporaries": 0.0, "gradients_sliced": 0.0}
    sizes["other"] = float(schedule.widths.master * whole)
    return sizes


def offloaded(sizes: Sizes, option: Option, schedule: Schedule) -> Sizes:
    """Without what offloading moves to the host: optimizer states, masters and gradient slices, then parameters."""
    if option.offload == "none":
        return sizes
    sizes = {**sizes, "optimizer": 0.0, "optimizer_temporaries": 0.0, "gradients_sliced": 0.0}
    # Slices in the compute dtype stay on the device for gathers, unless parameters are offloaded too.
    stays = not option.offload.startswith("parameters")
    share = schedule.widths.compute / schedule.widths.master if stays else 0.0
    sizes["parameters_sliced"] *= share
    if stays and schedule.shard == 1:
        # What one rank gathers is its slice.
        sizes["parameters_gathered"] = 0.0
    return sizes


def _with_overheads(sizes: Sizes, machine: Machine) -> Sizes:
    live = sum(sizes.values())
    return {**sizes, "other": sizes["other"] + machine.slack * live + machine.context}


def _host(job: Job, machine: Machine, option: Option, units: list[Unit]) -> float:
    """Processes, and what was offloaded; page-locked buffers are rounded up as torch does."""
    each = PROCESS_BYTES
    own = sum(unit.parameters for unit in units) / _slices(option)
    widths = job.widths
    if option.offload.endswith("cpu"):
        # Masters and gradients lie in page-locked memory, moments beside them.
        each += pinned_bytes(widths.master * own) + pinned_bytes(widths.gradient * own)
        each += job.optimizer_tensors * widths.master * own
        if option.offload == "parameters on cpu":
            each += pinned_bytes(widths.compute * own)
    elif option.offload != "none":
        largest = max(unit.parameters for unit in units) / _slices(option)
        if job.implementation == "muon":
            largest = max(largest, *map(prod, job.shape.matrices))
        each += _SLOTS * (3 * widths.master + widths.gradient) * largest
    if option.checkpointing.endswith("+cpu"):
        each += sum(pinned_bytes(kept_bytes(unit, option.checkpointing, option.tensor)) for unit in units)
    return each * machine.per_node


def _slices(option: Option) -> int:
    return option.shard if Stage.of(option.stage).shards_optimizer else 1


def step_seconds(
    job: Job, machine: Machine, option: Option, schedule: Schedule, units: list[Unit]
) -> tuple[StepSeconds, float]:
    """Seconds of a step, and bytes of model states that a rank sends in it.

    Args:
        units: as one rank holds them (`local_units`).
    """
    tokens = option.micro_batch * option.accumulate * job.sequence
    sizes = job.shape.transformer
    # Selective recomputation repeats no products.
    recompute = option.checkpointing not in ("off", "selective")
    if sizes is not None:
        # What tensor parallelism leaves whole, every rank computes for itself. Frozen weights have no gradient.
        operations = step_flops(
            sum(unit.parameters + 2 / 3 * sum(unit.frozen) for unit in units) - sizes.idle,
            tokens,
            recompute=recompute,
            layers=sizes.layers,
            hidden=sizes.hidden // option.tensor,
            sequence=job.sequence,
        )
    else:
        work = job.shape.work or Work(0.0, 0.0, None)
        again = work.forward if recompute else 0.0
        operations = option.micro_batch * option.accumulate * (work.forward + again + work.backward)
    # A 32-bit product takes twice the time of a 16-bit one at the least.
    compute = operations / machine.flops(sizes.hidden if sizes else None) * (2 if job.precision == "fp32" else 1)
    widths = job.widths
    # Forward, a recomputation, and backward twice move every weight or its gradient, however few tokens there are.
    passes = (4 if recompute else 3) * option.accumulate
    moved = float(passes * widths.compute * sum(unit.all_parameters for unit in units))
    if option.checkpointing == "selective":
        moved += repeated_traffic(sum(unit.working for unit in units)) * option.accumulate
    compute += moved / machine.gpu.memory_bandwidth
    tensor = _tensor_seconds(job, machine, option)
    # However few tokens there are, the host launches every block's kernels, in a recomputation once more.
    launches = (3 if option.checkpointing == "off" else 4) * option.accumulate
    launch = (TENSOR_LAUNCH if option.tensor > 1 else LAUNCH) * sum(map(is_block, units))
    compute = max(compute, launch * launches / 3 - tensor)
    padded = [padded_numels(unit, schedule) for unit in units if unit.all_parameters]
    trained, frozen = sum(numel for numel, _ in padded), sum(numel for _, numel in padded)
    gathers_frozen = Stage.of(option.stage).shards_parameters
    copies = machine.gpus // option.tensor
    shard, replicate = (option.shard, option.replicate) if _slices(option) > 1 else (copies, 1)
    messages = partial(
        overlap,
        option.stage,
        [
            (widths.compute * (numel + (fixed if gathers_frozen else 0)), widths.reduce * numel)
            for numel, fixed in padded
        ],
        compute,
        shard=shard,
        micro_batches=option.accumulate,
        link=machine.shard_link(shard, option.tensor),
        replicate_link=machine.replicate_link(shard, option.tensor),
        recompute=recompute,
        hidden_share=HIDDEN_SHARE,
    )
    found = messages(replicate=replicate)
    if replicate > 1:
        found = found._replace(between_copies=found.exposed - messages().exposed)
    elements = step_elements(option.stage, trained, option.shard, option.accumulate, option.replicate, frozen)
    sent = elements.all_gather * widths.compute + (elements.reduce_scatter + elements.all_reduce) * widths.reduce
    own = trained / _slices(option)
    update, transfer = update_seconds(job, machine, option, own, compute)
    transfer += _fetch_seconds(machine, option, units, compute)
    return found._replace(update=update, transfer=transfer, tensor=tensor), sent


def _tensor_seconds(job: Job, machine: Machine, option: Option) -> float:
    """Seconds of what ranks that share samples send each other; computing waits for all of it."""
    sizes = job.shape.transformer
    if sizes is None or option.tensor == 1:
        return 0.0
    link = machine.tensor_link()
    hidden_state = float(option.micro_batch * job.sequence * sizes.hidden * job.widths.compute)
    # As `activations_sent` counts: two all-reduces in forward, two in backward, one in a recomputation.
    reduces = 4 if option.checkpointing == "off" else 5
    each = reduces * all_reduce_seconds(hidden_state, option.tensor, link)
    if option.checkpointing.startswith("P_a"):
        each += gather_seconds(hidden_state, option.tensor, link)
    return each * sizes.layers * option.accumulate


def _fetch_seconds(machine: Machine, option: Option, units: list[Unit], compute: float) -> float:
    """Seconds of copies of activation checkpoints to the host and back that do not hide behind computing."""
    if not option.checkpointing.endswith("+cpu"):
        return 0.0
    moved = sum(kept_bytes(unit, option.checkpointing, option.tensor) for unit in units) * option.accumulate
    seconds = moved / machine.gpu.host
    # With recomputation forward is a quarter of computing.
    return max(0.0, seconds - HIDDEN_SHARE * compute / 4) + max(0.0, seconds - HIDDEN_SHARE * compute * 3 / 4)


def update_seconds(job: Job, machine: Machine, option: Option, own: float, compute: float) -> tuple[float, float]:
    """Seconds of the optimizer's step, and of transfers that do not hide.

    Args:
        own: elements of model states that this rank updates.
        compute: seconds of a step's forwards and backwards.
    """
    widths = job.widths
    if option.offload == "none":
        # Each state is read and written, and so is the master; the gradient is read.
        moved = own * (3 + 2 * job.optimizer_tensors) * widths.master
        return moved / machine.gpu.memory_bandwidth + _muon_seconds(job, machine, option), 0.0
    transfer = 0.0
    gradients = widths.gradient * own
    # Each reduce sends its gradients beside backward; from a step's second on, what is summed so far comes back first.
    reduces = option.accumulate if Stage.of(option.stage).shards_gradients else 1
    if not machine.computes_on_host:
        # The link carries both ways at once. The ranks of a host share its memory, which writes or reads every byte.
        over_link = gradients * reduces / machine.gpu.host
        in_memory = gradients * (2 * reduces - 1) / (machine.host_bandwidth / machine.per_node)
        down = max(0.0, max(over_link, in_memory) - compute / 2)
        transfer = widths.compute * own / machine.gpu.host + down
    update = cpu_step_seconds(own, machine.host_bandwidth / machine.per_node) + _muon_seconds(job, machine, option)
    if option.offload.endswith("nvme"):
        # Masters and states are read and written beside the update, gradients read; these are written in backward.
        disk = machine.nvme_bandwidth / machine.per_node
        moved = 2 * (1 + job.optimizer_tensors) * widths.master * own
        transfer += max(0.0, (moved + gradients) / disk - update)
        transfer += max(0.0, gradients * (2 * reduces - 1) / disk - compute / 2)
    if option.offload.startswith("parameters"):
        source = machine.gpu.host if option.offload.endswith("cpu") else machine.nvme_bandwidth / machine.per_node
        fetched = 2 * widths.compute * own * option.accumulate / source
        transfer += max(0.0, fetched - compute)
    return update, transfer


def _muon_seconds(job: Job, machine: Machine, option: Option) -> float:
    """Seconds of Newton-Schulz on the rank that has most of it to do."""
    if job.implementation != "muon":
        return 0.0
    sizes, ranks = job.shape.transformer, _slices(option)
    trained = sum(unit.parameters for unit in job.shape.units)
    matrices = job.shape.matrices
    operations = newton_schulz_operations(matrices, trained - sum(map(prod, matrices)), ranks)
    return operations / machine.flops(sizes.hidden if sizes else None)


def _limited_by(machine: Machine, option: Option, seconds: StepSeconds) -> str:
    reach = option.shard * option.tensor if _slices(option) > 1 else machine.gpus
    within = seconds.exposed - seconds.between_copies
    copies = machine.named_link(machine.gpus)
    parts = {
        "computing": seconds.compute,
        copies: seconds.between_copies,
        machine.named_link(reach): within + (seconds.between_copies if machine.named_link(reach) == copies else 0.0),
        "tensor parallelism's messages": seconds.tensor,
        "the optimizer's step": seconds.update,
        "the link to the host": seconds.transfer,
    }
    return max(parts, key=lambda name: parts[name])
