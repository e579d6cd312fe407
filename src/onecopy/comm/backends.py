"""Backends: which transport serves a process group, and which of its ranks are reached through memory.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py: `ProcessGroup._get_backend`,
`ProcessGroup._device_types` and `Backend.Options._timeout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from onecopy.comm.cross_memory import Neighbours, find_neighbours
from onecopy.comm.direct_exchange import DirectExchange
from onecopy.comm.native_calls import NativeCalls
from onecopy.comm.transport import Peers, Transport
from onecopy.memory.staging import Staging


def transport_for(group: dist.ProcessGroup, device: torch.device, staging: Staging) -> Transport:
    """The transport for tensors of ``device`` on ``group``, by the name of the backend that serves them there."""
    backend = _backend(group, device)
    return DirectExchange(staging) if backend == "gloo" else NativeCalls(staging, averages=backend == "nccl")


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a message of ``group`` may take, as it was made."""
    # A group for several kinds of devices has one limit for all.
    limit: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return limit


_neighbours: Final[WeakKeyDictionary[dist.ProcessGroup, Neighbours]] = WeakKeyDictionary()


def exchanges_directly(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors go from rank to rank on ``group`` by messages of ours (`direct_exchange.py`)."""
    return "cpu:gloo" in dist.get_backend_config(group)


def with_neighbours(peers: Peers, exchange: Callable[[object], list[object]]) -> Peers:
    """``peers`` with those that CPU tensors reach through memory. A collective call.

    Args:
        exchange: every rank's object, in order of places.
    """
    if not exchanges_directly(peers.group):
        return peers
    neighbours = _neighbours.get(peers.group)
    if neighbours is None:
        limit = time_limit(peers.group).total_seconds()
        neighbours = _neighbours[peers.group] = find_neighbours(peers.rank, peers.ranks, exchange, limit)
    return replace(peers, neighbours=neighbours)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    name: str = group._get_backend(device).name()
    return name


def control_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors ``group`` can send."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
