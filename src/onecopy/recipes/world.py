"""World: this process among its ranks, and the few values that the job itself exchanges.

Model states travel by the engine's own collectives; what passes here are losses, notes for people and the request to
stop. Without torchrun's variables in the environment there is one rank and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from onecopy.comm.mesh import Axis, make_mesh
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
from onecopy.resilience.meeting import join as join_job
from onecopy.resilience.meeting import store_of_torchrun
from onecopy.resilience.membership import membership

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank: its number among all ranks.
        local_rank: its number on this host.
        size: all ranks.
        device: where it computes.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device

    def among_data(self, tensor: int) -> World:
        """This process's place among ranks that see different data, where ``tensor`` neighbours see the same."""
        return World(self.rank // tensor, self.local_rank, self.size // tensor, self.device)

    @property
    def is_new(self) -> bool:
        """Whether this rank takes a lost one's place and has not met the others yet: it hears nothing of them."""
        return dist.is_initialized() and dist.get_backend() == "fake"

    @property
    def _axis(self) -> Axis:
        """All ranks, over the default process group, which is another one after a loss."""
        group = dist.group.WORLD if dist.is_initialized() else None
        axis = _axes.get(group)
        if axis is None:
            _axes.clear()
            ledger = Ledger()
            ledger.phase = "step"
            axis = _axes[group] = make_mesh(None, shards=True, ledger=ledger, staging=Staging()).shard
        return axis

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks.

        Raises:
            CollectiveError: if another rank has ended or does not answer in time; it names that rank.
        """
        sums = torch.tensor(values, dtype=torch.float64, device=self._axis.control_device)
        if collective := self._axis.combine(sums, "agree"):
            collective.finish()
        totals: list[float] = sums.tolist()
        return totals

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of ranks.

        Raises:
            CollectiveError: if another rank has ended or does not answer in time; it names that rank.
        """
        if self.is_new:
            return [value] * self.size
        # To wait for all here, where an error knows who is missing.
        self.sum(0.0)
        return self._axis.exchange_objects(value)


_axes: dict[dist.ProcessGroup | None, Axis] = {}


@contextmanager
def join(device: str, timeout: float) -> Iterator[World]:
    """Join the ranks that torchrun or the launcher of `onecopy run` started, and leave them again if all went well.

    Args:
        device: the type of device to compute on.
        timeout: seconds that any collective may take.
    """
    if membership() is not None:
        join_job(timeout)
    rank, local_rank, size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    own = torch.device(device) if device == "cpu" else torch.device(device, local_rank)
    if device != "cpu":
        torch.accelerator.set_device_index(local_rank)
    if size > 1 and not dist.is_initialized():
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            dist.get_default_backend_for_device(own),
            timeout=limit,
            store=store_of_torchrun(limit),
            rank=rank,
            world_size=size,
        )
    yield World(rank, local_rank, size, own)
    if size > 1:
        dist.destroy_process_group()
