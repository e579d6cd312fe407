"""`onecopy report`: a run directory as a page to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onecopy.errors import SettingsError


def report(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory that `onecopy train` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write the page. Left out: report.html in RUN_DIR.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the recorded step for ui.perfetto.dev. Left out: trace.json beside the page.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML file about a run: memory, traffic, a timeline of one step, loss and speed.

    The file opens without a network. The timeline is also written in Chrome's trace format.
    """
    from onecopy.report.page import render
    from onecopy.report.perfetto import perfetto_trace
    from onecopy.report.run import read_run

    try:
        run = read_run(run_directory)
        if trace and not run.traces:
            raise SettingsError(f"no trace to write: {run.notes['trace']}")
        page = out or run_directory / "report.html"
        written = {page: render(run)}
        if run.traces:
            written[trace or page.with_name("trace.json")] = json.dumps(perfetto_trace(run.traces))
        for path, text in written.items():
            _write(path, text)
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {str(path)!r}: {error.strerror}") from None
    typer.echo(f"{path}  {len(text.encode()) / 1e3:,.0f} kB")
