"""`onecopy tune`: the best settings for a training job on this machine, found by measuring."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from onecopy.errors import SettingsError, WriteError

if TYPE_CHECKING:
    from onecopy.tuner.tuned import Tuned


def _option(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, show_default=True)


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def tune(
    config_file: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.TOML]", help="A config of `onecopy train`; its defaults if left out."),
    ] = None,
    budget: Annotated[str, _option("After so long no new probe starts: 90s, 20m, 2h.", "TIME")] = "20m",
    objective: Annotated[
        str,
        _option("tokens_per_second; memory, the least; or cost, the fewest rank-seconds a sample.", "TEXT"),
    ] = "tokens_per_second",
    memory: Annotated[
        str | None, _option("What a rank may hold, like 24GB; all that there is if not given.", "SIZE")
    ] = None,
    global_batch: Annotated[
        int | None, _option("Samples in a step over all ranks; the config's data.batch if not given.", "INT")
    ] = None,
    space: Annotated[Path | None, _option("A TOML file with the values to try of each setting.", "FILE")] = None,
    directory: Annotated[
        Path | None,
        _option("Holds the journal and the result; runs/tune-<config's name> if not given.", "DIR"),
    ] = None,
    probe_limit: Annotated[str, _option("The longest that one probe may take.", "TIME")] = "5m",
    timed: Annotated[str, _option("For how long a probe times steps; it takes four at the least.", "TIME")] = "3s",
    silence: Annotated[str, _option("A probe without a sign of life for so long hangs.", "TIME")] = "60s",
    control_group: Annotated[
        str, _option("A directory of memory control groups in which probes may make theirs.", "DIR")
    ] = "",
    calibration: Annotated[
        bool, typer.Option("--calibration/--no-calibration", help="Use and keep this machine's measured constants.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")] = False,
) -> None:
    """Find the best settings for what `onecopy train` would run, by measuring them.

    Probes are short and run in processes of their own; one that runs out of memory, hangs or crashes is noted. The same
    command goes on where an earlier one was ended. Exit code 1 says that nothing could be measured.
    """
    from onecopy.recipes.settings import load
    from onecopy.tuner.job import job_of
    from onecopy.tuner.probe.order import Length, Limits
    from onecopy.tuner.space import Space, read_space
    from onecopy.tuner.tune import Wanted, objective_of, search_for

    # From here on there is something to close.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = directory or Path("runs") / f"tune-{Path(config_file).stem if config_file else 'default'}"
    try:
        config = load(config_file, {})
        chosen = Space() if space is None else read_space(space)
        ranks = config.parallel.ranks
        given = "WORLD_SIZE" in os.environ
        wanted = Wanted(
            global_batch=config.data.batch if global_batch is None else global_batch,
            space=chosen,
            ranks=None if ranks == "auto" or given else ranks,
            device=config.parallel.device,
            objective=objective_of(objective),
            memory=_bytes(memory),
            budget=_seconds("budget", budget),
            directory=place,
            length=Length(_seconds("timed", timed)),
            limits=Limits(None, _seconds("silence", silence), _seconds("probe-limit", probe_limit), control_group),
            calibrate=calibration,
        )
        found = search_for(job_of(config, chosen.states), wanted, lambda line: typer.echo(line, err=True))
        if _is_first():
            _publish(found, place)
            _show(found, place, as_json)
    except (SettingsError, WriteError) as error:
        if _is_first():
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None
    raise typer.Exit(130 if found.interrupted else 0 if found.best else 1)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _bytes(text: str | None) -> int | None:
    from onecopy.planner.quantities import parse_bytes

    return None if text is None else int(parse_bytes(text))


def _seconds(name: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smh])", text.strip())
    if not found or not float(found[1]):
        raise SettingsError(f"--{name} must be a time like 90s, 20m or 2h; found {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _publish(found: Tuned, place: Path) -> None:
    """The page, and the result for programs, beside the journal."""
    from onecopy.tuner.page import render

    files = {"tuning.json": json.dumps(found.as_dict(), indent=2, ensure_ascii=False), "tuning.html": render(found)}
    if found.config is not None:
        files["best.toml"] = found.config
    for name, text in files.items():
        try:
            (place / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise WriteError(f"cannot write {str(place / name)!r}: {error.strerror}") from None


def _show(found: Tuned, place: Path, as_json: bool) -> None:
    if as_json:
        json.dump(found.as_dict(), sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    from onecopy.planner.quantities import gigabytes, seconds

    console = Console()
    # Settings are long, and a table whose cells are broken is hard to read: lines may be longer than the terminal.
    console = Console(width=max(console.width, 160))
    table = Table("setting", "step", "corrected plan", "speed", "held", "corrected plan", box=None, pad_edge=False)
    for probe in found.probes:
        timed = probe.outcome.timed
        table.add_row(
            probe.candidate.words(),
            f"{seconds(timed.seconds)} ± {timed.spread:.1%}" if timed else probe.outcome.kind,
            seconds(probe.expected_seconds),
            found.speed(probe) if timed else "",
            gigabytes(probe.outcome.peak),
            gigabytes(probe.expected_bytes),
        )
    console.print(table)
    for line in (f"\n{found.reason}", f"The search ended: {found.ended}.", *found.notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.best is not None:
        console.print(f"\n{found.shard_call}\n\n{found.config}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{place / 'tuning.html'}", markup=False, highlight=False, soft_wrap=True)
