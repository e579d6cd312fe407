"""Launch: one command that starts its own ranks, and is a rank when torchrun started it.

===============================  =====================================================================================
environment                      what happens
===============================  =====================================================================================
RANK is set (torchrun)           this process is that rank
srun started several tasks       this process is the rank that its task is
one rank                         this process is it; no process group
[recovery]                       the launcher of `onecopy run` starts the same command N times, and more for those lost
otherwise                        torchrun's own agent starts the same command N times
===============================  =====================================================================================

A rank that fails says why itself, in one piece, and ends at once. The others then lose their connections to it; they
end quietly, so that the first error stays the one to read.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from enum import IntEnum
from typing import Final, NoReturn

import torch

from onecopy.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveTimeout,
    MismatchError,
    NotFiniteError,
    OffloadError,
    SettingsError,
    WriteError,
)
from onecopy.integrations import slurm
from onecopy.recipes.checks import check, resolve
from onecopy.recipes.config import Config
from onecopy.recipes.environment import prepare_environment, threads
from onecopy.recipes.metrics import make_run_directory
from onecopy.recipes.world import join
from onecopy.resilience.membership import ADDRESS, membership

_LAST_WORDS: Final = 5.0
"""Seconds that other ranks give the first one to say what they all found."""


class Exit(IntEnum):
    """Exit codes of a rank and of the launcher."""

    DONE = 0
    FAILED = 1
    SETTINGS = 2
    LOST_PEER = 3
    INTERRUPTED = 128 + signal.SIGINT


def launch(config: Config, arguments: list[str]) -> int:
    """Train, here or in ranks started for it.

    Args:
        config: what ``arguments`` say.
        arguments: of the `onecopy` command, for ranks to be started with.

    Returns:
        The exit code.

    Raises:
        SettingsError: before any rank starts, if the settings cannot work.
    """
    if slurm.in_step():
        slurm.set_environment()
    if "RANK" in os.environ or ADDRESS in os.environ:
        _be_a_rank(config)
    config = resolve(config)
    check(config)
    assert isinstance(config.parallel.ranks, int)
    if config.parallel.ranks == 1:
        return _train(config)
    if config.recovery.is_on:
        return _start_replaceable_ranks(config, arguments)
    return _start_ranks(config.parallel.ranks, arguments)


def _train(config: Config) -> Exit:
    # Not at the top: the launcher of other ranks has no use for it.
    from onecopy.recipes.train import train

    torch.set_num_threads(threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    with join(config.parallel.device, config.parallel.timeout) as world:
        return Exit.DONE if train(config, world) else Exit.INTERRUPTED


# --- a rank


def _be_a_rank(config: Config) -> NoReturn:
    member = membership()
    if member is not None and member.attempt > 0:
        # All began again: what the run has saved is in its own directory.
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})
    message, known_to_all = "", False
    threading.excepthook = _leave_to_the_loop
    try:
        config = resolve(config)
        check(config)
        code = _train(config)
    except (SettingsError, MismatchError, CheckpointError, NotFiniteError) as error:
        # The same on every rank of a host, or known to the first one alone.
        message, known_to_all = f"error: {error}\n" if _is_first() else "", True
        code = Exit.SETTINGS if isinstance(error, SettingsError | MismatchError) else Exit.FAILED
    except (WriteError, OffloadError) as error:
        why = error.strerror if isinstance(error, OffloadError) else error
        message, code = f"error: {why}\n", Exit.FAILED
    except CollectiveTimeout as error:
        message, code = f"rank {_rank()} gave up: {error}\n", Exit.FAILED
    except Exception as error:
        if isinstance(error, CollectiveError):
            message, code = f"rank {_rank()} stopped: {error}\n" if _is_first() else "", Exit.LOST_PEER
        else:
            message, code = f"rank {_rank()} failed:\n{traceback.format_exc()}", Exit.FAILED
    sys.stdout.flush()
    sys.stderr.write(message)
    sys.stderr.flush()
    if member is not None:
        if code in (Exit.DONE, Exit.INTERRUPTED):
            member.end_well()
        elif known_to_all:
            member.end_job(code)
        else:
            member.fail(message)
    if known_to_all and not _is_first():
        # The message must be out before torchrun sees an exit and ends them all.
        time.sleep(_LAST_WORDS)
    # Past destructors, which may wait for ranks that are gone.
    os._exit(code)


def _rank() -> str:
    # With [recovery] it is known once the ranks have joined.
    return os.environ.get("RANK", "0")


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _leave_to_the_loop(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread of its own. What a disk refuses there, it refuses the loop, too, which says so."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


# --- the launcher


def _start_ranks(ranks: int, arguments: list[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from onecopy.recipes.loopback import BACKEND, register

    # The agent's log would bury what the ranks say.
    logging.disable(logging.CRITICAL)
    prepare_environment(ranks)
    register()
    # Without a directory for logs nothing is left behind, however this process ends.
    options = [f"--rdzv-backend={BACKEND}", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        run.run(run.parse_args([*options, f"--log-dir={os.devnull}", "-m", "onecopy.cli.main", *arguments]))
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        return _explain({rank: failure.exitcode for rank, failure in error.failures.items()})
    return Exit.DONE


def _start_replaceable_ranks(config: Config, arguments: list[str]) -> int:
    from onecopy.resilience.forks import Forks
    from onecopy.resilience.launcher import Job, Launcher

    assert isinstance(config.parallel.ranks, int)
    chosen = config.recovery
    prepare_environment(config.parallel.ranks)
    # One directory for all that come and go.
    directory = make_run_directory(config.run.directory)
    command = ["onecopy.cli.main", *arguments, f"--directory={directory}"]
    job = Job(command, config.parallel.ranks, chosen.spares, chosen.heartbeat, is_module=True)
    return Launcher(job, Forks()).run()


def _explain(exit_codes: dict[int, int]) -> int:
    """Say what ended the ranks, if none of them could; returns the launcher's exit code."""
    codes = set(exit_codes.values())
    for said in (Exit.FAILED, Exit.SETTINGS, Exit.INTERRUPTED):
        if said in codes:
            return said
    for rank, code in exit_codes.items():
        # Those that the agent ended on its own are not the cause.
        if code not in (Exit.LOST_PEER, -signal.SIGTERM):
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            hint = "; often the host has run out of memory" if code == -signal.SIGKILL else ""
            sys.stderr.write(f"rank {rank} was ended {how}{hint}\n")
    return Exit.FAILED
