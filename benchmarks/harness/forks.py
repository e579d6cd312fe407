"""Ranks of a benchmark as forked processes, which never outlive the call that started them.

The launcher must run no thread and must not have computed anything: ranks are forked from it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness.namespaces import INTERFACE, Network
from onecopy.comm.cross_memory import SWITCH

MESSAGE_LIMIT: Final = timedelta(seconds=120)
"""After which gloo gives a message up. A whole unit takes 11 s at 10 Mbit/s."""


class RanksError(RuntimeError):
    """The ranks did not finish."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., object],
    *args: object,
    limit: float,
    network: Network | None = None,
    threads: int = 1,
    progress: Callable[[Path], str] | None = None,
) -> list[list[str]]:
    """Call ``function(rank, write, *args)`` on ranks joined by gloo.

    Args:
        function: calls ``write(line)`` for what it wants to hand back.
        limit: seconds after which all are killed.
        network: namespaces for the ranks; None joins them by the loopback interface.
        threads: torch's, of each rank.
        progress: says from the folder, for `read_lines`, what was found done and what was not, for an error.

    Returns:
        Each rank's lines.

    Raises:
        RanksError: if they do not finish within the limit.
        torch.multiprocessing.ProcessException: with the traceback of a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="onecopy-benchmark-") as name:
        folder = Path(name)
        arguments = (num_ranks, network, threads, folder, function, args)
        ranks = mp.start_processes(_rank, arguments, nprocs=num_ranks, join=False, start_method="fork")
        try:
            deadline = monotonic() + limit
            while not ranks.join(timeout=max(0.0, deadline - monotonic()), grace_period=2.0):
                if monotonic() >= deadline:
                    found = progress(folder) if progress else "some still running"
                    raise RanksError(f"expected {num_ranks} ranks to end within {limit:.0f} s, found {found}")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [read_lines(folder, rank) for rank in range(num_ranks)]


def read_lines(folder: Path, rank: int) -> list[str]:
    """What a rank has written so far."""
    path = folder / f"rank{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def _rank(
    rank: int,
    num_ranks: int,
    network: Network | None,
    threads: int,
    folder: Path,
    function: Callable[..., object],
    args: Sequence[Any],
) -> None:
    # The launcher's handler is not a rank's; and a rank ends with its launcher, however that ended.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    # Peers call functions that torch is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if network is not None:
        network.enter(rank)
        # Ranks in one machine would find each other's memory, and leave nothing for the kernel to count.
        os.environ[SWITCH] = "0"
    torch.set_num_threads(threads)
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE if network else "lo", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=MESSAGE_LIMIT)
    with (folder / f"rank{rank}.txt").open("w") as lines:
        function(rank, lambda line: print(line, file=lines, flush=True), *args)
    dist.barrier()
    dist.destroy_process_group()
