"""Plan: what the planner expects of this very run, to stand beside what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from onecopy.errors import SettingsError
from onecopy.planner.machine import GPUS, Machine
from onecopy.planner.simulate import describe_units
from onecopy.planner.step import Phase, Schedule, Sizes, Unit, Widths, layout, step_bytes
from onecopy.planner.time import overlap, step_flops
from onecopy.planner.traffic import step_elements
from onecopy.recipes.config import Config
from onecopy.recipes.model import build_architecture
from onecopy.recipes.world import World

_TIMED: Final[tuple[Phase, ...]] = ("forward", "backward", "step")


def plan_run(config: Config, world: World, vocabulary: int) -> dict[str, Any] | None:
    """What `summary.json` holds as "planned"; None where fake tensors cannot run the model, or parameters are frozen.

    Activations come from one forward of the model on fake tensors, all else from formulas.

    Args:
        config: one whose ranks are known.
        vocabulary: tokens of the data.

    Returns:
        ``memory``: bytes by the meter's categories at a step's highest moment; with activations, as the profiled step
        counts them. ``bytes_sent`` by a rank in a step. ``seconds`` of a step, on a GPU whose figures are known.
    """
    parallel = config.parallel
    micro_batch = config.data.batch // (world.size * parallel.accumulate)

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(micro_batch, config.data.sequence_length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    try:
        units = describe_units(lambda: build_architecture(config, vocabulary), batch, precision=parallel.precision)
    except (SettingsError, RuntimeError):
        # No plan is no reason not to train: a model may look at values, which fake tensors have not.
        return None
    schedule = Schedule(
        parallel.stage,
        world.size // parallel.replicate,
        parallel.replicate,
        parallel.accumulate,
        parallel.prefetch,
        Widths.of(parallel.precision),
        implementation=config.optimizer.implementation,
        native=world.device.type != "cpu",
    )
    # Activations are counted in the profiled step alone, and move the highest moment there.
    plain = [Unit(unit.name, unit.numels) for unit in units]
    moments = [_highest(step_bytes(plain, schedule)), _first_step(plain, schedule)]
    if config.run.profile_step:
        moments.append(_highest(step_bytes(units, schedule)))
    memory = {name: max(moment[name] for moment in moments) for name in moments[0]}
    psi = sum(_padded(unit, schedule) for unit in units if unit.numels)
    elements = step_elements(parallel.stage, psi, schedule.shard, schedule.micro_batches, schedule.replicate)
    planned: dict[str, Any] = {"memory": memory, "bytes_sent": elements.total * schedule.widths.reduce}
    if (seconds := _seconds(config, world, units, schedule)) is not None:
        planned["seconds"] = seconds
    return planned


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


def _padded(unit: Unit, schedule: Schedule) -> int:
    return layout(unit, schedule).padded_numel


def _seconds(config: Config, world: World, units: list[Unit], schedule: Schedule) -> float | None:
    if world.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(world.device).lower().replace(" ", "")
    known = next((gpu for key, gpu in GPUS.items() if key in name), None)
    if known is None:
        return None
    here = torch.cuda.device_count()
    machine = Machine(world.size, known, nodes=max(1, world.size // here))
    tokens = config.data.batch // world.size * config.data.sequence_length
    widths = schedule.widths
    padded = [_padded(unit, schedule) for unit in units if unit.numels]
    operations = step_flops(sum(unit.parameters for unit in units), tokens)
    found = overlap(
        schedule.stage,
        [(widths.compute * numel, widths.reduce * numel) for numel in padded],
        operations / machine.flops(None) * (2 if config.parallel.precision == "fp32" else 1),
        shard=schedule.shard,
        replicate=schedule.replicate,
        micro_batches=schedule.micro_batches,
        link=machine.shard_link(schedule.shard),
        replicate_link=machine.replicate_link(schedule.shard),
    )
    return found.total
