"""Tables: the page's figures in words. They also stand where a reader cannot see a chart."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from onecopy.report.figures import label
from onecopy.report.run import LANES, Run, Trace, number, partly_counted, steps_with_activations
from onecopy.report.words import count, difference, megabytes, milliseconds, setting


class Table(NamedTuple):
    """Rows of text below a head; all columns but the first hold numbers."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The run at a glance: (what, value, remark)."""
    found = run.summary
    total = found.get("bytes_sent_per_step", {}).get("total", {})
    losses = [loss for step in run.steps if (loss := number(step.get("loss"))) is not None]
    peaks = found.get("peak_memory") or [peak for step in run.steps if (peak := number(step.get("peak_memory")))]
    cells = []
    if losses:
        cells.append(("loss, last step", f"{losses[-1]:.4f}", f"{losses[0]:.4f} at the first"))
    if (validation := number(found.get("validation_loss"))) is not None:
        cells.append(("validation loss", f"{validation:.4f}", "last evaluation"))
    if (speed := number(found.get("tokens_per_second"))) is not None:
        cells.append(("tokens per second", count(speed), "all ranks, mean"))
    if peaks:
        cells.append(("peak memory", megabytes(max(peaks)), memory_source(run)))
    if (sent := number(total.get("measured"))) is not None:
        formula = number(total.get("formula")) or 0.0
        remark = "one rank sends nothing" if not (sent or formula) else f"formula: {difference(sent, formula)}"
        cells.append(("sent per step and rank", megabytes(sent), remark))
    return cells


def memory_source(run: Run) -> str:
    """What the metric `peak_memory` counts."""
    device = run.config.get("parallel", {}).get("device", "cpu")
    return "resident set of the process" if device == "cpu" else f"allocated on {device}"


def activations_remark(run: Run) -> str:
    """Where activations are to be seen, if they are not among what is drawn over the steps."""
    counted = steps_with_activations(run)
    if not counted:
        return (
            "Activations were not counted." if any(isinstance(step.get("memory"), dict) for step in run.steps) else ""
        )
    if not partly_counted(run):
        return ""
    highest = max(number(step["memory"]["activations"]) or 0.0 for step in counted)
    steps = ", ".join(str(step["step"]) for step in counted)
    return f"Without activations, which were counted in step {steps} alone: {megabytes(highest)}, see Inside a step."


def headline(run: Run) -> str:
    """What was trained, and how it was spread."""
    found, parallel = run.summary, run.config.get("parallel", {})
    parts = []
    if "parameters" in found:
        parts.append(f"{count(found['parameters'])} parameters")
    if parallel:
        parts.append(
            f"stage {parallel.get('stage')} over {parallel.get('ranks')} ranks "
            f"({parallel.get('device')}, {parallel.get('precision')})"
        )
    if run.steps:
        parts.append(f"{run.steps[-1]['step']} steps")
    if found.get("interrupted"):
        parts.append("stopped by a signal")
    if lost := [event for event in run.events if event.kind == "recovery"]:
        times = "once" if len(lost) == 1 else f"{len(lost)} times"
        parts.append(f"ranks lost {times}, which cost {sum(event.seconds for event in lost):.2f} s")
    return ", ".join(parts)


_MOST_EVENTS: Final = 50


def events(run: Run) -> Table | None:
    """What happened to ranks; of very much, what took longest."""
    longest = sorted(run.events, key=lambda event: -event.seconds)[:_MOST_EVENTS]
    rows = [[str(event.step), event.words] for event in run.events if event in longest]
    left = f", the {_MOST_EVENTS} longest of {len(run.events)}" if len(run.events) > _MOST_EVENTS else ""
    return Table(f"Lost and slow ranks{left}", ["before step", ""], rows) if rows else None


def traffic(run: Run) -> Table | None:
    """Bytes by operation beside ZeRO's formula."""
    sent = run.summary.get("bytes_sent_per_step", {})
    rows = [
        [
            operation,
            count(row["measured"]),
            count(row["formula"]),
            difference(row["measured"], row["formula"]),
            f"{row['elements']:.4g}",
        ]
        for operation, row in sent.items()
        if row["measured"] or row["formula"]
    ]
    head = ["operation", "sent", "formula", "difference", "in Ψ"]
    return Table("Bytes a rank sends per step", head, rows) if rows else None


def traffic_symbols(run: Run) -> str:
    """What the formula's symbols stand for in this run."""
    found = run.summary
    copies = f", {found['replicate']} copies" if found.get("replicate", 1) > 1 else ""
    return (
        f"Ψ = {count(found['padded_parameters'])} elements of {found['element_bytes']} bytes (with padding), "
        f"N = {found['shard']}{copies}, g = {found['micro_batches']}."
    )


def lanes(run: Run) -> Table | None:
    """Time by lane, rank by rank. A unit that waits does not compute."""
    head = ["rank", *LANES, "wait, share", "sent"]
    rows = [_lane_row(trace) for trace in run.traces if trace.events]
    return Table("Time in which each lane was busy", head, rows) if rows else None


def _lane_row(trace: Trace) -> list[str]:
    seconds = {lane: trace.busy(lane) for lane in LANES}
    seconds["compute"] = trace.busy("compute", "wait") - seconds["wait"]
    share = seconds["wait"] / trace.seconds if trace.seconds else 0.0
    sent = sum(event.bytes for event in trace.events)
    return [str(trace.rank), *map(milliseconds, seconds.values()), f"{share:.1%}", count(sent)]


def made_again(run: Run) -> str:
    """What happened to ranks before the recorded step was made; its trace begins after it."""
    steps = {trace.step for trace in run.traces}
    found = [f"{event.words} before step {event.step} was made" for event in run.events if event.step in steps]
    return f"The timeline begins after what happened before: {'; '.join(found)}." if found else ""


def peaks(run: Run) -> Table | None:
    """The highest moment of the recorded step, by category, rank by rank."""
    traces = [trace for trace in run.traces if trace.memory]
    if not traces:
        return None
    highest = [max(trace.memory, key=lambda sample: sum(sample[1].values())) for trace in traces]
    kinds = dict.fromkeys(kind for _, sizes in highest for kind in sizes)
    rows = [[label(kind), *(megabytes(sizes.get(kind, 0)) for _, sizes in highest)] for kind in kinds]
    rows.append(["all", *(megabytes(sum(sizes.values())) for _, sizes in highest)])
    rows.append(["at", *(milliseconds(time) for time, _ in highest)])
    return Table("The highest moment of the step", ["", *(f"rank {trace.rank}" for trace in traces)], rows)


def planned(run: Run) -> Table | None:
    """What the planner expected beside what was measured, where the summary holds a plan."""
    plan = run.summary.get("planned")
    if not isinstance(plan, dict):
        return None
    rows = []
    for kind, size in plan.get("memory", {}).items():
        seen = [step["memory"][kind] for step in run.steps if kind in step.get("memory", {})]
        rows.append(_planned_row(label(kind), size, max(seen, default=None), megabytes))
    for kind, size in plan.get("off_device", {}).items():
        held = [step["off_device"][kind] for step in run.steps if kind in step.get("off_device", {})]
        if size or any(held):
            rows.append(_planned_row(f"{label(kind)}, off the device", size, max(held, default=None), megabytes))
    if plan.get("activations_sent"):
        sent = run.summary.get("activations_sent_per_step")
        rows.append(_planned_row("activations sent per step", plan["activations_sent"], sent, megabytes))
    if "bytes_sent" in plan:
        measured = run.summary.get("bytes_sent_per_step", {}).get("total", {}).get("measured")
        rows.append(_planned_row("sent per step", plan["bytes_sent"], measured, megabytes))
    if "seconds" in plan:
        # The first step also warms up.
        seconds = sorted(step["seconds"] for step in run.steps[1:] if "seconds" in step)
        rows.append(
            _planned_row(
                "time of a step", plan["seconds"], seconds[len(seconds) // 2] if seconds else None, milliseconds
            )
        )
    return Table("Planned and measured, a rank", ["", "planned", "measured", "difference"], rows) if rows else None


def _planned_row(what: str, expected: float, measured: float | None, words: Any) -> list[str]:
    if measured is None:
        return [what, words(expected), "not measured", ""]
    return [what, words(expected), words(measured), difference(measured, expected)]


def settings(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """The config's sections, each with its keys in words."""
    return [
        (section, [(key, setting(value)) for key, value in table.items()])
        for section, table in run.config.items()
        if isinstance(table, dict)
    ]
