"""Crew: the ranks that probes run on: some of this machine, or those that torchrun or Ray has started already.

=================  ==========================================  =====================================
                   ranks of a probe                            who decides what is probed
=================  ==========================================  =====================================
`Local`            forked from one host process                this process
`Given`            one from each given process's own host      the first; the others are told
=================  ==========================================  =====================================

A given process never runs a probe's steps itself, so that it outlives them all.
"""

from __future__ import annotations

import os
import socket
import tempfile
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist

from onecopy.comm.objects import all_gather_objects
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.probe.client import Host
from onecopy.tuner.probe.order import Length, Limits, Order, Report
from onecopy.tuner.workload import Workload

T = TypeVar("T")

_PATIENCE: Final = timedelta(hours=2)
"""How long given processes wait for the first one to decide."""


class Crew(ABC):
    """Where probes run.

    Attributes:
        size: ranks that there are.
        device: what they compute on.
        leads: whether this process decides.
    """

    size: int
    device: str
    leads: bool = True

    @abstractmethod
    def probe(self, candidate: Candidate, length: Length, limits: Limits) -> list[Report]:
        """Run one probe; a report of each rank, in their order."""

    def share(self, value: T) -> T:
        """The first process's value, on all."""
        return value

    def close(self) -> None:  # noqa: B027  (a crew may have started nothing)
        """End what was started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Local(Crew):
    """Ranks of this machine."""

    def __init__(self, workload: Workload, size: int, device: str) -> None:
        self.size, self.device = size, device
        self._threads = threads_of(size)
        self._host = Host(workload, self._threads)

    def probe(self, candidate: Candidate, length: Length, limits: Limits) -> list[Report]:
        ranks = range(candidate.ranks)
        with tempfile.TemporaryDirectory(prefix="onecopy-probe-") as folder:
            meeting = (Path(folder) / "store").as_uri()
            return self._host.probe(
                Order(candidate, ranks, ranks, candidate.ranks, meeting, self.device, self._threads, length, limits)
            )

    def close(self) -> None:
        self._host.close()


class Given(Crew):
    """The ranks of a process group, or of the environment that torchrun made for one.

    Every process makes it, and calls `probe` and `share` as often as the others.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._own_group = not dist.is_initialized()
        if self._own_group:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        # Small values travel over the CPU, whatever backend the program's group has.
        self._group: Any = dist.group.WORLD if self._own_group else dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.size, self.device, self.leads = dist.get_world_size(), device, dist.get_rank() == 0
        self._rank = dist.get_rank()
        self._local = int(os.environ.get("LOCAL_RANK", self._rank))
        self._threads = threads_of(int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))
        self._address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._host = Host(workload, self._threads)

    def share(self, value: T) -> T:
        found: T = self._exchange(value if self.leads else None)[0]
        return found

    def probe(self, candidate: Candidate, length: Length, limits: Limits) -> list[Report]:
        candidate, length, limits = self.share((candidate, length, limits))
        meeting = self.share(f"tcp://{self._address}:{_free_port()}" if self.leads else "")
        local, threads = [self._local], self._threads
        own = self._host.probe(
            Order(candidate, [self._rank], local, self.size, meeting, self.device, threads, length, limits)
        )
        return [report for reports in self._exchange(own) for report in reports]

    def _exchange(self, own: Any) -> list[Any]:
        """What every process has, in order of ranks."""
        return all_gather_objects(own, self._group, self.size, torch.device("cpu"))

    def close(self) -> None:
        self._host.close()
        if self._own_group:
            dist.destroy_process_group()


def threads_of(ranks: int) -> int:
    """Threads for each of so many ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
