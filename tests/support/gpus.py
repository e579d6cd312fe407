"""Ranks on real GPUs: `run_on_gpus(2, function)` calls ``function(rank, device)`` in two forked ranks joined by NCCL.

The parent must not have started CUDA. `torch.cuda.device_count` asks the driver's library, and leaves it so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ranks import run_ranks

COUNT: Final = torch.cuda.device_count()
"""GPUs of this machine."""


def run_on_gpus(
    num_ranks: int,
    function: Callable[[int, torch.device], Any],
    *,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
) -> list[Any]:
    """Call ``function(rank, device)`` on forked ranks, each with a GPU of its own; what each returned.

    Args:
        timeout: seconds after which every rank is killed.
        group_timeout: of the process group.
    """

    def join(rank: int, size: int, store: Path, limit: float) -> None:
        torch.cuda.set_device(rank)
        file = dist.FileStore(str(store), size)
        dist.init_process_group("nccl", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=limit))

    def call(rank: int) -> Any:
        return function(rank, torch.device("cuda", rank))

    return run_ranks(num_ranks, call, join=join, timeout=timeout, group_timeout=group_timeout)
