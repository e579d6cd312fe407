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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onecopy.errors import CollectiveError, CollectiveTimeout

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

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in order of ranks.

        Raises:
            CollectiveError: if another rank has ended or does not answer in time.
        """
        if self.size == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        with _named("a sum over ranks"):
            dist.all_gather(everyone, own)
        return torch.stack(everyone).sum(0).tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of ranks.

        Raises:
            CollectiveError: if another rank has ended or does not answer in time.
        """
        everyone: list[Any] = [value] * self.size
        if self.size > 1:
            with _named("an exchange of notes"):
                dist.all_gather_object(everyone, value)
        return everyone


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "imed out" in str(error) or "imeout" in str(error):
            raise CollectiveTimeout(
                f"{what}: another rank did not answer in time. If it had more to do, raise parallel.timeout."
            ) from error
        if connection_broke(error):
            raise CollectiveError(f"{what}: the connection to another rank broke; its own output says why.") from error
        raise


def connection_broke(error: Exception) -> bool:
    """Whether an error means that another rank has ended, rather than that something is wrong here."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe"))


@contextmanager
def join(device: str, timeout: float) -> Iterator[World]:
    """Join the ranks that torchrun started, and leave them again if all went well.

    Args:
        device: the type of device to compute on.
        timeout: seconds that any collective may take.
    """
    rank, local_rank, size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    own = torch.device(device) if device == "cpu" else torch.device(device, local_rank)
    if device != "cpu":
        torch.accelerator.set_device_index(local_rank)
    if size > 1:
        backend = dist.get_default_backend_for_device(own)
        with _named("joining the other ranks"):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    yield World(rank, local_rank, size, own)
    if size > 1:
        dist.destroy_process_group()
