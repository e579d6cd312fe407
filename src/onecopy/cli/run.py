"""`onecopy run`: starts a script's ranks on this host, or on one of several, and replaces the ones that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script that calls onecopy.join().")],
    ranks: Annotated[int, typer.Option(help="Ranks to start, on each host.", min=1)] = 2,
    spares: Annotated[
        int, typer.Option(help="Processes more on each host, that wait for the loss of a rank.", min=0)
    ] = 0,
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
    nnodes: Annotated[int, typer.Option(help="Hosts; the command is started on each.", min=1)] = 1,
    node_rank: Annotated[
        int, typer.Option(help="The number of this host, from 0; --nnodes and above: a spare host.", min=0)
    ] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(help="HOST:PORT at which host 0 listens for the others.", metavar="HOST:PORT")
    ] = "",
    join_timeout: Annotated[float, typer.Option(help="Seconds for which a host may be missing.", min=0)] = 300.0,
) -> None:
    """Run a script on several ranks; a lost one is replaced, and gets its states back from its peers' memory.

    What follows SCRIPT is passed to it. See docs/recovery.md for what the script has to do.
    """
    if not module and not Path(script).is_file():
        _refuse(f"there is no file {script}")
    if (nnodes > 1) != bool(rdzv_endpoint):
        _refuse("--nnodes above 1 and --rdzv-endpoint HOST:PORT belong together")
    if node_rank and nnodes == 1:
        _refuse(f"--node-rank {node_rank} needs --nnodes above 1")
    if min_ranks > ranks:
        _refuse(f"--min-ranks {min_ranks} is more than --ranks {ranks}")
    if rejoin and not 0 < min_ranks < ranks:
        _refuse("--rejoin says something beside a --min-ranks below --ranks alone")
    if min_ranks and nnodes > 1:
        _refuse("--min-ranks is for one host: on several, a lost rank or host is waited for")
    from onecopy.resilience.lines import parse_endpoint

    try:
        endpoint = parse_endpoint(rdzv_endpoint) if rdzv_endpoint else ("127.0.0.1", 0)
    except ValueError as error:
        _refuse(str(error))
    from onecopy.recipes.environment import prepare_environment
    from onecopy.resilience.forks import Forks

    prepare_environment(ranks, endpoint[0])
    # It imports torch while this process does.
    forks = Forks()
    from onecopy.resilience.guest import Guest, Place
    from onecopy.resilience.hosts import Hosts
    from onecopy.resilience.launcher import Job, Launcher

    arguments = [script, *context.args]
    job = Job(
        arguments,
        ranks,
        spares,
        heartbeat,
        losses,
        is_module=module,
        fewest=min_ranks,
        rejoin=rejoin,
        hosts=nnodes,
        patience=join_timeout,
    )
    if node_rank:
        place = Place(endpoint, node_rank, nnodes, ranks, join_timeout)
        raise typer.Exit(Guest(place, forks, job.command).run())
    processes: Forks | Hosts = forks
    if nnodes > 1:
        try:
            processes = Hosts(forks, endpoint, nnodes, ranks)
        except OSError as error:
            forks.close()
            _refuse(f"host 0 cannot listen at {rdzv_endpoint}: {error.strerror or error}")
    raise typer.Exit(Launcher(job, processes).run())


def _refuse(why: str) -> NoReturn:
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(2)
