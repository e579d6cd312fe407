"""Plan: what the planner expects of this very run, to stand beside what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from onecopy.errors import SettingsError
from onecopy.memory.store.pool import SLOTS
from onecopy.planner.answer.describe import transformer_of
from onecopy.planner.answer.estimate import Job, Option, step_seconds
from onecopy.planner.engine.simulate import describe_units
from onecopy.planner.engine.step import step_bytes
from onecopy.planner.formulas.activations import products_over, share_of_layer
from onecopy.planner.formulas.traffic import step_elements
from onecopy.planner.machine.machine import Machine, gpu_named
from onecopy.planner.model.schedule import Phase, Schedule, Sizes, Unit, padded_numels
from onecopy.planner.model.shape import Checkpointing, Shape, Transformer, checkpointed, is_block, kept_bytes
from onecopy.planner.model.tensor import cut
from onecopy.planner.model.whole import Balance, balance
from onecopy.recipes.checks import offload_of
from onecopy.recipes.config import Config
from onecopy.recipes.model import build_architecture
from onecopy.recipes.sharded import units_of
from onecopy.recipes.world import World
from onecopy.sharding.model.chosen import hidden_matrices

_TIMED: Final[tuple[Phase, ...]] = ("forward", "backward", "step")


def plan_run(config: Config, world: World, vocabulary: int) -> dict[str, Any] | None:
    """What `summary.json` holds as "planned"; None where fake tensors cannot run the model.

    Activations come from one forward of the model on fake tensors, all else from formulas.

    Args:
        config: one whose ranks are known.
        vocabulary: tokens of the data.

    Returns:
        ``memory``: bytes by the meter's categories at a step's highest moment; with activations, as the profiled step
        counts them, to which what a block recomputes is not visible. ``off_device``: bytes by category in host memory
        or files. ``bytes_sent`` by a rank in a step, and ``activations_sent`` to ranks with which it shares samples.
        ``seconds`` of a step, on a GPU whose figures are known.
    """
    parallel = config.parallel
    copies = world.size // parallel.tensor
    micro_batch = config.data.batch // (copies * parallel.accumulate)

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(micro_batch, config.data.sequence_length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    try:
        units = describe_units(
            lambda: build_architecture(config, vocabulary),
            batch,
            units=units_of(parallel.units),
            precision=parallel.precision,
        )
    except (SettingsError, RuntimeError):
        # No plan is no reason not to train: a model may look at values, which fake tensors have not.
        return None
    sizes = _sizes(config, vocabulary)
    option = Option(
        parallel.stage,
        micro_batch,
        parallel.accumulate,
        _checkpointing(config),
        "none",
        copies // parallel.replicate,
        parallel.replicate,
        parallel.prefetch,
        parallel.tensor,
        parallel.sequence,
    )
    job = Job(
        Shape("", tuple(units), sizes), config.data.sequence_length, parallel.precision, config.optimizer.implementation
    )
    schedule = replace(option.schedule(job), native=world.device.type != "cpu")
    if sizes is not None:
        units = cut(units, sizes.hidden, parallel.tensor, ends=parallel.sequence)
    cuts = _cuts_inputs(config)
    held = [_on_one_rank(unit, option, cuts=cuts) for unit in units]
    # The meter does not see what a block recomputes.
    units = [replace(unit, working=0.0) for unit in held]
    # Activations are counted in the profiled step alone, and move the highest moment there.
    plain = [replace(unit, activations=0.0, logits=0.0) for unit in units]
    moments = [_highest(step_bytes(plain, schedule)), _first_step(plain, schedule)]
    if config.run.profile_step:
        moments.append(_highest(step_bytes(units, schedule)))
    memory = {name: max(moment[name] for moment in moments) for name in moments[0]}
    if config.optimizer.optimizer == "muon":
        memory["optimizer"] = _balance(config, vocabulary, schedule).state_bytes(0, int(schedule.widths.master))
    psi = sum(padded_numels(unit, schedule)[0] for unit in units)
    elements = step_elements(parallel.stage, psi, schedule.shard, schedule.micro_batches, schedule.replicate)
    on_disk = _on_disk(config, psi / schedule.shard, schedule)
    widest = max(padded_numels(unit, schedule)[0] for unit in units) / schedule.shard
    if on_disk:
        if config.optimizer.optimizer == "muon":
            on_disk["optimizer, on disk"] = memory["optimizer"]
        memory = _without(memory, config, psi / schedule.shard, widest, schedule, units)
    parts = [kept_bytes(unit, option.checkpointing, parallel.tensor) for unit in units]
    kept = sum(parts)
    states_pool = SLOTS * (3.0 * schedule.widths.master + schedule.widths.gradient) * widest if on_disk else 0.0
    parts_pool = SLOTS * max(parts) if config.activations.keep_on not in ("device", "cpu") else 0.0
    memory["communication"] += max(states_pool, parts_pool)
    inputs = sum(unit.inputs or 0.0 for unit in units) if option.checkpointing == "selective" else kept
    gathered = inputs * (parallel.tensor - 1) * parallel.accumulate
    planned: dict[str, Any] = {
        "memory": memory,
        "off_device": {"checkpoints": kept if option.checkpointing.endswith("+cpu") else 0.0} | on_disk,
        "bytes_sent": elements.total * schedule.widths.reduce,
        "activations_sent": gathered if cuts else 0.0,
    }
    if sizes is not None and (machine := _machine(world)) is not None:
        planned["seconds"] = step_seconds(job, machine, option, schedule, held)[0].total
    return planned


def _balance(config: Config, vocabulary: int, schedule: Schedule) -> Balance:
    """How Muon's matrices lie on the ranks."""
    with torch.device("meta"):
        model = build_architecture(config, vocabulary)
    named = dict(model.named_parameters())
    matrices = tuple(tuple(named.pop(name).shape) for name in hidden_matrices(model))
    return balance(matrices, sum(parameter.numel() for parameter in named.values()), schedule.slices)


def _checkpointing(config: Config) -> Checkpointing:
    """The planner's name for what the config says of activations."""
    chosen, cuts = config.activations, _cuts_inputs(config)
    if not chosen.recompute:
        return "off"
    if chosen.recompute == "selective":
        return "selective"
    if chosen.keep_on == "device":
        return "P_a" if cuts else "units"
    return "P_a+cpu" if cuts else "units+cpu"


def _cuts_inputs(config: Config) -> bool:
    """Whether inputs are kept in parts over the tensor ranks, which sequence parallelism has cut already."""
    chosen, parallel = config.activations, config.parallel
    return bool(chosen.recompute) and chosen.partition and parallel.tensor > 1 and not parallel.sequence


def _on_disk(config: Config, own: float, schedule: Schedule) -> Sizes:
    """Bytes of ``own`` elements of model states in files, by the meter's rows; nothing if they are in memory."""
    offload, widths = offload_of(config), schedule.widths
    if offload is None or not offload.on_disk("optimizer"):
        return {}
    copy = 0.0
    if offload.on_disk("parameters") and (offload.parameters != offload.optimizer or widths.compute != widths.master):
        copy = widths.compute * own
    return {
        "parameters_sliced, on disk": widths.master * own + copy,
        "gradients_sliced, on disk": widths.gradient * own,
        "optimizer, on disk": 2.0 * widths.master * own,
    }


def _without(memory: Sizes, config: Config, own: float, widest: float, schedule: Schedule, units: list[Unit]) -> Sizes:
    """``memory`` once states are in files: what gathers read and step counts are left."""
    offload, widths = offload_of(config), schedule.widths
    assert offload is not None
    lent = 0.0 if offload.on_disk("parameters") else widths.compute * own
    return memory | {
        "parameters_sliced": lent,
        "parameters_gathered": 0.0 if lent and schedule.shard == 1 else memory["parameters_gathered"],
        "gradients_sliced": widths.gradient * widest,
        "optimizer": 4.0 * sum(len(unit.numels) for unit in units),
    }


def _sizes(config: Config, vocabulary: int) -> Transformer | None:
    """Those of the small GPT-2, or in the config of a given model."""
    small, path = config.model, Path(config.model.path)
    if not small.path:
        return Transformer(small.layers, small.hidden, small.heads, vocabulary)
    file = path / "config.json" if path.is_dir() else path
    return transformer_of(json.loads(file.read_text(encoding="utf-8")))


def _on_one_rank(unit: Unit, option: Option, *, cuts: bool) -> Unit:
    """A unit of whole blocks as one of the tensor ranks holds it; ``cuts``: its input in parts (P_a)."""
    share = share_of_layer(option.tensor, sequence_parallel=option.sequence) if is_block(unit) else 1.0
    # What is called P_a is cut by `checkpointed`.
    parts = option.sequence or (cuts and option.checkpointing == "selective")
    inputs = unit.inputs and unit.inputs / (option.tensor if parts else 1)
    products = unit.products and products_over(unit.products, unit.inputs or 0.0, option.tensor)
    unit = replace(
        unit,
        activations=unit.activations * share,
        inputs=inputs,
        products=products,
        repeated=unit.repeated * share,
    )
    return checkpointed(unit, option.checkpointing, option.tensor)


def _highest(peaks: dict[Phase, Sizes]) -> Sizes:
    """The meter's view of the highest moment: logits are activations, the optimizer's temporaries are not seen."""
    seen = []
    for phase in _TIMED:
        sizes = dict(peaks[phase])
        sizes["activations"] += sizes.pop("logits")
        del sizes["optimizer_temporaries"], sizes["other"]
        seen.append(sizes)
    return max(seen, key=lambda sizes: sum(sizes.values()))


def _first_step(units: list[Unit], schedule: Schedule) -> Sizes:
    """The optimizer makes its states at the end of the first step, whose highest moment may be another one."""
    peaks = step_bytes(units, schedule)
    before = step_bytes(units, replace(schedule, optimizer_tensors=0))
    return _highest({**before, "step": peaks["step"]})


def _machine(world: World) -> Machine | None:
    """The GPUs that this runs on; None where their figures are not known."""
    if world.device.type != "cuda":
        return None
    known = gpu_named(torch.cuda.get_device_name(world.device))
    if known is None:
        return None
    return Machine(world.size, known, nodes=max(1, world.size // torch.cuda.device_count()))
