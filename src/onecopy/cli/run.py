"""`onecopy run`: starts a script's ranks on this host, and replaces the ones that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script that calls onecopy.join().")],
    ranks: Annotated[int, typer.Option(help="Ranks to start.", min=1)] = 2,
    spares: Annotated[int, typer.Option(help="Processes more, that wait for the loss of a rank.", min=0)] = 0,
    heartbeat: Annotated[
        float, typer.Option(help="Seconds after which a rank that does not answer is given up; 0: never.", min=0)
    ] = 0.0,
    losses: Annotated[int, typer.Option(help="Losses within an hour that are made good.", min=0)] = 20,
    min_ranks: Annotated[
        int,
        typer.Option(help="Ranks with which training goes on while others are missing; 0: it waits for each.", min=0),
    ] = 0,
    rejoin: Annotated[
        float,
        typer.Option(
            help="Seconds after a loss until a process is started that makes ranks more again; inf: never.", min=0
        ),
    ] = 0.0,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Run a script on several ranks; a lost one is replaced, and gets its states back from its peers' memory.

    What follows SCRIPT is passed to it. See docs/recovery.md for what the script has to do.
    """
    if not module and not Path(script).is_file():
        typer.echo(f"error: there is no file {script}", err=True)
        raise typer.Exit(2)
    if min_ranks > ranks:
        typer.echo(f"error: --min-ranks {min_ranks} is more than --ranks {ranks}", err=True)
        raise typer.Exit(2)
    if rejoin and not 0 < min_ranks < ranks:
        typer.echo("error: --rejoin says something beside a --min-ranks below --ranks alone", err=True)
        raise typer.Exit(2)
    from onecopy.recipes.environment import prepare_environment
    from onecopy.resilience.forks import Forks

    prepare_environment(ranks)
    # It imports torch while this process does.
    forks = Forks()
    from onecopy.resilience.launcher import Job, Launcher

    job = Job(
        [script, *context.args], ranks, spares, heartbeat, losses, is_module=module, fewest=min_ranks, rejoin=rejoin
    )
    raise typer.Exit(Launcher(job, forks).run())
