"""Backends: which transport serves a process group, which of its ranks are reached through memory, and which groups
beside it carry control messages, where it serves no CPU tensors itself, and reduces, where a device has streams.

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
from torch.distributed.constants import default_pg_timeout

from onecopy.comm.cross_memory import Neighbours, find_neighbours
from onecopy.comm.direct_exchange import DirectExchange
from onecopy.comm.native_calls import NativeCalls
from onecopy.comm.transport import Peers, Transport
from onecopy.errors import CollectiveError
from onecopy.memory.staging import Staging


def transport_for(group: dist.ProcessGroup, device: torch.device, staging: Staging) -> Transport:
    """The transport for tensors of ``device`` on ``group``, by the name of the backend that serves them there."""
    backend = _backend(group, device)
    return (
        DirectExchange(staging)
        if backend == "gloo"
        else NativeCalls(staging, averages=backend == "nccl", device=device)
    )


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a message of ``group`` may take, as it was made; torch's default where its backend does not tell."""
    # A group for several kinds of devices has one limit for all.
    kinds = group._device_types
    options = getattr(group._get_backend(kinds[0]), "options", None) if kinds else None
    limit: timedelta = default_pg_timeout if options is None else options._timeout
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


_SOONER: Final = 0.9
"""The limit of a control message, in those of its group. On NCCL a watchdog ends the process at the group's own limit
and does not say which rank is missing: a control message is to say so before."""

_beside: Final[WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]] = WeakKeyDictionary()
_reducing: Final[WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]] = WeakKeyDictionary()


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` itself sends CPU tensors. One that names no devices, as one written in Python, sends all."""
    return not group._device_types or any(device.type == "cpu" for device in group._device_types)


def with_control(peers: Peers) -> Peers | None:
    """``peers`` over a group that sends CPU tensors, where theirs does not: one on gloo beside it. A collective call.

    To read a message that came to a device, the host would have to wait for all that the device has still to compute.
    Over a group of the CPU the host waits for the other ranks' programs alone, and can say which of them are missing.
    None where there is no gloo either.

    Raises:
        CollectiveError: if the ranks cannot meet there.
    """
    if serves_cpu(peers.group):
        return peers
    if not dist.is_gloo_available():
        return None
    beside = _beside.get(peers.group)
    if beside is None:
        try:
            beside = dist.new_group(
                list(peers.ranks),
                timeout=time_limit(peers.group) * _SOONER,
                backend="gloo",
                use_local_synchronization=True,
                sort_ranks=False,
                group_desc="onecopy control",
            )
        except RuntimeError as error:
            raise CollectiveError(
                f"ranks {peers.ranks} could not connect over gloo, which carries control messages beside the process "
                f"group's own backend ({str(error).strip().splitlines()[0]}): look at the other ranks' output, and "
                "set GLOO_SOCKET_IFNAME to a network interface by which they reach each other."
            ) from error
        assert isinstance(beside, dist.ProcessGroup)
        _beside[peers.group] = beside
    return replace(peers, group=beside)


def accelerated_by(group: dist.ProcessGroup) -> str | None:
    """The accelerator and its own backend, such as "cuda:nccl", if ``group`` has one; None else."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    names = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    name = names.get(accelerator.type)
    return None if name in (None, "gloo", "fake") else f"{accelerator.type}:{name}"


def for_reduces(peers: Peers) -> Peers:
    """``peers`` over a group for reduces alone, where an accelerator's backend serves theirs. A collective call.

    The collectives of one group run one after the other, in the order in which each rank issues them. In a group of
    their own reduces do not delay the gathers behind them; and when a rank sends a unit's gradients, between which
    gathers, need not be what it is on the others.
    """
    own = accelerated_by(peers.group)
    if own is None:
        return peers
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None and peers.size < dist.get_world_size():
        # NCCL would split the communicator of all ranks, for which all of them would have to come here.
        return peers
    group = _reducing.get(peers.group)
    if group is None:
        group = dist.new_group(
            list(peers.ranks),
            timeout=time_limit(peers.group),
            backend=own,
            use_local_synchronization=True,
            sort_ranks=False,
            group_desc="onecopy reduces",
        )
        assert isinstance(group, dist.ProcessGroup)
        _reducing[peers.group] = group
    return replace(peers, group=group)


def own_device(group: dist.ProcessGroup) -> torch.device:
    """A device of this rank whose tensors ``group`` sends: the CPU if it does, else its accelerator."""
    if serves_cpu(group):
        return torch.device("cpu")
    return torch.device(group._device_types[0].type, torch.accelerator.current_device_index())
