"""Report: what a person sees. A live line while training, plain lines where there is no terminal, and a summary."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from onecopy.recipes.account import Summary
from onecopy.recipes.config import Config
from onecopy.recipes.metrics import Record
from onecopy.report import words
from onecopy.stage import Stage


def plain_console() -> Console:
    """A terminal on which text keeps its own colour: digits inside of paths are part of a name."""
    return Console(highlight=False)


class Report:
    """A sink that writes to the terminal.

    Args:
        steps: how many there will be.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("step 0", total=steps)
        self._progress.start()

    def write(self, record: Record) -> None:
        if record.kind == "evaluation":
            self._console.print(f"step {record.step}/{self._steps}  validation loss {record.values['loss']:.4f}")
            return
        if record.kind in ("recovery", "slow"):
            seconds = record.values.get("lost_seconds", record.values["seconds"])
            given_up = record.values.get("given_up") == 1
            happened = words.event(record.kind, words.ranks(record.ranks), seconds, given_up=given_up)
            self._console.print(f"step {record.step}/{self._steps}  {happened}", soft_wrap=True)
            return
        line = self._line(record)
        self._progress.update(self._task, completed=record.step, description=line)
        # Some twenty lines for a log file, however long the run.
        if not self._console.is_terminal and (
            record.step in (1, self._steps) or record.step % max(1, self._steps // 20) == 0
        ):
            self._console.print(line, soft_wrap=True)

    def _line(self, record: Record) -> str:
        values = record.values
        return (
            f"step {record.step}/{self._steps}  loss {values['loss']:.4f}  "
            f"{values['tokens_per_second']:,.0f} tokens/s  memory {megabytes(values['peak_memory'])}  "
            f"sent {megabytes(values['bytes_sent'])}"
        )

    def close(self) -> None:
        self._progress.stop()


def print_start(console: Console, config: Config, model: nn.Module) -> None:
    """Say what is about to be trained, and what each rank holds of it."""
    parallel = config.parallel
    kind = Stage.of(parallel.stage)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert isinstance(parallel.ranks, int)
    states = {
        "optimizer states": kind.shards_optimizer,
        "gradients": kind.shards_gradients,
        "parameters": kind.shards_parameters,
    }
    share = parallel.ranks // parallel.tensor // parallel.replicate
    sharded = ", ".join(name for name, is_sharded in states.items() if is_sharded)
    whole = ", ".join(name for name, is_sharded in states.items() if not is_sharded)
    holds = [f"1/{share} of {sharded}" if sharded else "", f"whole {whole}" if whole else ""]
    part = f" of its 1/{parallel.tensor} of each block" if parallel.tensor > 1 else ""
    console.print(
        f"{type(model).__name__}, {parameters:,} parameters, stage {parallel.stage} over {parallel.ranks} ranks "
        f"({parallel.device}, {parallel.precision}); each rank holds {' and '.join(filter(None, holds))}{part}",
        soft_wrap=True,
    )
    console.print(f"run directory: {config.run.directory}", soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    """The closing words."""
    if summary.interrupted:
        console.print(f"stopped by a signal after step {summary.steps}")
    if summary.resumed_at:
        console.print(f"went on after step {summary.resumed_at} of an earlier run")
    validation = "" if summary.validation_loss is None else f", validation {summary.validation_loss:.4f}"
    console.print(f"loss {summary.first_loss:.4f} at the first step, {summary.last_loss:.4f} at the last{validation}")
    console.print(f"{summary.tokens_per_second:,.0f} tokens/s")
    if summary.checkpoint is not None:
        console.print(f"checkpoint: {summary.checkpoint}", soft_wrap=True)
    console.print(f"peak memory by rank: {', '.join(map(megabytes, summary.peak_memory))}", soft_wrap=True)
    table = Table(title="bytes a rank sends per step", title_justify="left")
    for column in ("operation", "sent", "formula", "formula in Ψ"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation, sent in summary.bytes_sent_per_step.items():
        if sent.measured or sent.formula:
            table.add_row(operation, f"{sent.measured:,.0f}", f"{sent.formula:,.0f}", f"{sent.elements:.4g}")
    if table.row_count:
        console.print(table)
        copies = f", {summary.replicate} copies" if summary.replicate > 1 else ""
        console.print(
            f"Ψ = {summary.padded_parameters:,} elements of {summary.element_bytes} bytes (with padding), "
            f"N = {summary.shard}{copies}, g = {summary.micro_batches}",
            soft_wrap=True,
        )
    else:
        console.print("model states lie on one rank: none were sent")
    _print_planned(console, summary)


def _print_planned(console: Console, summary: Summary) -> None:
    """What the planner expected, beside what was measured."""
    if summary.planned is None:
        return
    table = Table(title="planned and measured, a rank", title_justify="left")
    for column in ("", "planned", "measured", "difference"):
        table.add_column(column, justify="right" if column else "left")
    rows = [(kind, size, summary.highest_memory.get(kind)) for kind, size in summary.planned["memory"].items()]
    rows += [
        (f"{kind}, off the device", size, summary.highest_off_device.get(kind))
        for kind, size in summary.planned["off_device"].items()
    ]
    rows.append(("activations sent per step", summary.planned["activations_sent"], summary.activations_sent_per_step))
    rows.append(("sent per step", summary.planned["bytes_sent"], summary.bytes_sent_per_step["total"].measured))
    for kind, planned, measured in rows:
        if planned or measured:
            seen = "not measured" if measured is None else megabytes(measured)
            difference = f"{measured / planned - 1:+.1%}" if measured and planned else ""
            table.add_row(kind.replace("_", " "), megabytes(planned), seen, difference)
    console.print(table)


def megabytes(count: float) -> str:
    """Bytes for people. MB = 1e6 bytes."""
    return f"{count / 1e6:,.1f} MB"
