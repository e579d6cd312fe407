"""Ranks on the emulated device: `run_on_device(2, function)` calls ``function(rank, device)`` in two forked ranks.

Each rank has a device of its own, as ranks of one machine have, and the default process group is "emunccl" over gloo.
What a rank returns comes with what the device has seen: reports, host waits, and the orderings that were asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accelerator
from onecopy.sharding.engine import engine
from ranks import GROUP_TIMEOUT, run_ranks

Device = Any
"""The module of `device/module.cpp`."""

_device: Device | None = None


@dataclass(frozen=True)
class Seen:
    """What one rank has returned, and what its device saw.

    Attributes:
        result: of the function.
        reports: races, memory handed out too early, misaligned collectives.
        host_waits: each wait of the host, with the line that caused it.
        orderings: each wait of a stream and each record_stream, by the line that asked for it.
    """

    result: Any
    reports: list[str]
    host_waits: list[str]
    orderings: set[str]


def run_on_device(
    num_ranks: int,
    function: Callable[[int, torch.device], Any],
    *,
    backend: str = accelerator.BACKEND,
    without: Collection[str] = (),
    group_timeout: float = GROUP_TIMEOUT,
    timeout: float = 60.0,
) -> list[Seen]:
    """Call ``function(rank, device)`` on forked ranks, and return what was seen of each, in rank order.

    Args:
        function: takes a rank and its device; may be a closure.
        backend: of the default process group.
        without: orderings that the device disregards.
        group_timeout: seconds that a message of the process group may take.
        timeout: seconds after which every rank is killed.
    """
    built = accelerator.build()

    def join(rank: int, size: int, store: Path, group_timeout: float) -> None:
        global _device
        # All of a test's model may be gathered ahead by default, and then nothing is released before backward.
        engine.PREFETCH_BYTES = 0
        _device = accelerator.start(built, size)
        torch.accelerator.set_device_index(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=group_timeout),
        )

    def call(rank: int) -> tuple[Any, list[str], list[str], set[str]]:
        device = the_device()
        device.disregard(set(without))
        result = function(rank, torch.device(accelerator.NAME, rank))
        return result, device.reports(), device.host_waits(), device.orderings()

    answers = run_ranks(num_ranks, call, join=join, group_timeout=group_timeout, timeout=timeout)
    return [Seen(*answer) for answer in answers]


def the_device() -> Device:
    """This rank's device, to ask what it has seen."""
    assert _device is not None, "only ranks of run_on_device have one"
    return _device


def reports_of(seen: Collection[Seen]) -> list[str]:
    """All ranks' reports."""
    return [report for rank in seen for report in rank.reports]
