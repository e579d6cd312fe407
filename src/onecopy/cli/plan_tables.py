"""The plan as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from onecopy.planner.answer.advice import Advice
from onecopy.planner.answer.compare import Comparison
from onecopy.planner.answer.errors import Errors, errors, share
from onecopy.planner.answer.estimate import Estimate, Job
from onecopy.planner.answer.paste import config_toml, shard_call
from onecopy.planner.answer.redundancy import Redundancy
from onecopy.planner.answer.survival import Way, losses_a_day
from onecopy.planner.answer.sweep import Curve, Threshold
from onecopy.planner.answer.zero_r import Configured
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import CATEGORIES
from onecopy.planner.quantities import count, gigabytes, rate, seconds
from onecopy.stage import Stage


def print_plan(
    console: Console, job: Job, machine: Machine, advice: Advice, rows: int, notes: Sequence[str] = ()
) -> None:
    """Options, the memory of the one to take, the advice.

    Args:
        notes: lines on the machine.
    """
    sequence = f", sequences of {job.sequence:,}" if job.shape.rate == "tokens" else ""
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    loss = ", loss in chunks" if job.loss_bytes is None else ""
    console.print(
        f"{job.shape.name}: {count(job.shape.parameters)} parameters in {len(job.shape.units)} units, {job.precision}"
        f"{loss}{sequence}, {machine.gpus} GPU{'s' if machine.gpus > 1 else ''}{nodes} of "
        f"{gigabytes(machine.gpu.memory)}",
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    if job.shape.transformer is None and not any(unit.activations for unit in job.shape.units):
        console.print("time unknown, and activations: the module has no example_inputs function to measure them with")
    first = [] if advice.best is None else [advice.best]
    _print_options(console, [*first, *advice.estimates], rows, errors(machine, job.shape))
    if advice.best is not None:
        print_memory(console, advice.best)
    console.print(f"\n{advice.reason}", style="bold", soft_wrap=True, highlight=False)
    if advice.runner_up is not None:
        console.print(f"runner-up: {_line(advice.runner_up)}", soft_wrap=True, highlight=False)
    if advice.later is not None:
        missing = " and ".join(advice.later.option.missing)
        console.print(
            f"not in onecopy yet: {missing}, which would allow {_line(advice.later)}", soft_wrap=True, highlight=False
        )
    for number, remedy in enumerate(advice.remedies, 1):
        console.print(f"{number}. {remedy.words} ({_memory(remedy.found)})", soft_wrap=True, highlight=False)


def _line(found: Estimate) -> str:
    return f"{found.option.words()}: {found.speed}, {_memory(found)}"


def _memory(found: Estimate) -> str:
    """Of the device, and of a host where something was moved there."""
    moved = found.option.offload != "none" or found.option.checkpointing.endswith("+cpu")
    return gigabytes(found.peak) + (f", {gigabytes(found.host)} on a host" if moved else "")


def _print_options(console: Console, estimates: Sequence[Estimate], rows: int, wrong: Errors) -> None:
    table = Table(title="options, best first; what onecopy does not have yet is marked *", title_justify="left")
    table.add_column("option", min_width=24)
    # A narrow terminal shows what decides; --json has it all.
    names = [name for name in _COLUMNS if console.width >= _WIDE or name in _NARROW]
    for name in names:
        left = name in ("in", "fits", "limited by")
        error = {"peak": wrong.memory, "step": wrong.time, "speed": wrong.time}.get(name)
        table.add_column(name + share(error), justify="left" if left else "right", no_wrap=name != "limited by")
    for found in _spread(estimates, rows):
        cells = {
            "peak": gigabytes(found.peak),
            "in": found.peak_phase,
            "fits": "yes" if found.fits else "no",
            "host": gigabytes(found.host),
            "sent": gigabytes(found.bytes_sent + found.activations_sent),
            "step": seconds(found.seconds.total) if found.rate else "unknown",
            "exposed": seconds(found.seconds.exposed),
            "speed": found.speed if found.rate else "unknown",
            "limited by": found.limited_by,
        }
        words = found.option.words() + ("" if found.available else " *")
        table.add_row(words, *(cells[name] for name in names))
    console.print(table)


_COLUMNS: Final = ("peak", "in", "fits", "host", "sent", "step", "exposed", "speed", "limited by")
_NARROW: Final = ("peak", "fits", "step", "speed")
_WIDE: Final = 140
"""Characters from which all columns are shown."""


def _spread(estimates: Sequence[Estimate], rows: int) -> list[Estimate]:
    """The best option of each kind first, so that every stage is seen; then the rest."""
    kinds: dict[tuple[object, ...], Estimate] = {}
    for found in estimates:
        kinds.setdefault(found.option.kind, found)
    return list(kinds.values())[:rows]


def print_memory(console: Console, found: Estimate) -> None:
    """Bytes by category, phase by phase."""
    table = Table(title=f"memory of a rank: {found.option.words()}", title_justify="left")
    table.add_column("category")
    for phase in found.peaks:
        table.add_column(phase, justify="right")
    for category in CATEGORIES:
        sizes = [peak.get(category, 0.0) for peak in found.peaks.values()]
        if any(sizes):
            name = _LABELS.get(category, category.replace("_", " "))
            table.add_row(name, *(gigabytes(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("all", *(gigabytes(sum(peak.values())) for peak in found.peaks.values()))
    console.print(table)
    notes = [
        "load: the whole fp32 model beside its slices; "
        + ("too much, so build it on meta" if found.loads_on_meta else "a model built on meta needs less"),
        "save: whole fp32 parameters inside onecopy.gathered; slices need nothing on top",
        f"host: {gigabytes(found.host)} on each node"
        + (f", of {gigabytes(found.host_limit)}" if found.host_limit is not None else ""),
    ]
    console.print("\n".join(notes), style="dim", soft_wrap=True, highlight=False)


_LABELS = {"other": "context, allocator, other"}


def print_paste(console: Console, job: Job, machine: Machine, found: Estimate, model: str | None) -> None:
    """The call and the config."""
    console.print("\nIn a script:\n", style="bold")
    console.print(shard_call(job, found), markup=False, highlight=False, soft_wrap=True)
    if job.shape.transformer is None:
        # It trains language models of transformers.
        return
    console.print("\nFor `onecopy train`:\n", style="bold")
    console.print(config_toml(job, machine, found, model), markup=False, highlight=False, soft_wrap=True)


def print_sweep(console: Console, swept: Sequence[Curve], crossing: float | None, hurts: Sequence[Threshold]) -> None:
    """Step times over the link's bandwidth, and where stage 3 begins to hurt."""
    table = Table(title="step time over the link's bandwidth, same micro-batches", title_justify="left")
    table.add_column("link", justify="right")
    for curve in swept:
        table.add_column(f"stage {curve.stage}", justify="right")
    for place, (bandwidth, _) in enumerate(swept[0].points):
        if place % 3 == 0:
            table.add_row(rate(bandwidth), *(seconds(curve.points[place][1]) for curve in swept))
    console.print(table)
    where = "nowhere in this range" if crossing is None else f"at {rate(crossing)}"
    console.print(f"stage 3 takes a tenth longer than stage 2: {where}", soft_wrap=True, highlight=False)
    for threshold in hurts:
        console.print(f"  {threshold.text()}", soft_wrap=True, highlight=False)


def print_redundancy(console: Console, found: Redundancy) -> None:
    """What copies cost and save."""
    table = Table(title=f"{found.copies} copies of each slice, {found.days:g} days", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = {
        "lost with one rank, without copies": gigabytes(found.unique),
        "memory more on each rank": gigabytes(found.memory),
        "sent more by each rank in a step": gigabytes(found.traffic),
        "failures expected": f"{found.failures:,.2f}",
        **{f"every slice survives {lost} lost at once": f"{odds:.2%}" for lost, odds in found.survival.items()},
        "best time between checkpoints, without copies": f"{found.checkpoint_every / 3600:,.1f} h",
        "lost in the run without copies": f"{found.lost_without / 3600:,.2f} h",
        "lost in the run with copies": f"{found.lost_with / 3600:,.2f} h",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print("onecopy.shard(copies=...) holds them, and onecopy.resilient comes back from them")


def print_survival(console: Console, found: Mapping[int, Sequence[Way]], losses: float | None) -> None:
    """Ways to survive losses, by the number of ranks."""
    often = "one loss in 50,700 device-hours" if losses is None else f"{losses:g} losses a day"
    table = Table(title=f"ways to survive losses, at {often}; losses are by day", title_justify="left")
    for name in ("ranks", "losses", "way", "memory", "sent a step", "slower", "time lost", "steps lost"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for ranks, rows in found.items():
        a_day = losses_a_day(ranks) if losses is None else losses
        best = min(rows, key=lambda way: way.cost)
        for number, way in enumerate(rows):
            table.add_row(
                f"{ranks:,}" if not number else "",
                f"{a_day:.2g}" if not number else "",
                f"{way.name}{' *' if way is best else ''}",
                gigabytes(way.memory),
                gigabytes(way.traffic),
                f"{way.slower:.3%}",
                f"{way.lost:.3%}",
                f"{way.steps:,.1f}",
                end_section=number == len(rows) - 1,
            )
    console.print(table)
    console.print("* costs least time. Some of it is assumed for large jobs: docs/recovery.md.")


def print_zero_r(console: Console, configured: Sequence[Configured]) -> None:
    """The configurations of ZeRO-R: the paper's formulas, and what onecopy would hold."""
    table = Table(title="ZeRO-R: the configurations of the paper's Table 3, one micro-batch a step")
    table.title_justify = "left"
    table.add_column("")
    table.add_column("option")
    for name in ("parameters", "states", "checkpoints", "both", "onecopy's peak", "fits"):
        table.add_column(name, justify="right")
    for one in configured:
        table.add_row(
            one.name,
            one.found.option.words(),
            count(one.parameters),
            *(gigabytes(size) if size else "0" for size in (one.states, one.checkpoints)),
            gigabytes(one.states + one.checkpoints),
            gigabytes(one.found.peak),
            "yes" if one.found.fits else "no",
        )
    console.print(table)
    console.print(
        "states, checkpoints: by the paper's formulas; the peak has logits, the block that computes and overheads too",
        style="dim",
        soft_wrap=True,
        highlight=False,
    )


def print_simulated(console: Console, found: Comparison) -> None:
    """The engine on fake tensors beside the formulas."""
    table = Table(
        title=f"formulas beside the engine on fake tensors, {found.ranks} ranks, stage {found.stage}",
        title_justify="left",
    )
    table.add_column("phase")
    for name in ("category", "formula", "engine", "difference"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for phase, category, formula, engine in found.rows:
        difference = f"{formula / engine - 1:+.2%}" if engine else ""
        table.add_row(phase, category.replace("_", " "), gigabytes(formula), gigabytes(engine), difference)
    console.print(table)
    kind = "hybrid sharding" if Stage.of(found.stage).shards_optimizer and found.replicate > 1 else "all ranks"
    console.print(f"sent by the engine in a step: {gigabytes(found.bytes_sent)} ({kind})", highlight=False)
