"""Monitor: a collective that a device does not end is named in the log, and who has not come to it, in time.

Over NCCL a rank that stays away ends no wait of the host's: the others launch on, their devices stand still, and at the
process group's limit a watchdog ends the process. It knows the collective's number alone. So a thread of each rank
notes in the group's store how many collectives its program has come to, and which was the last; and where one of its
own has stood still for most of the limit, it looks up who has come to fewer.

Private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch.distributed.distributed_c10d._get_default_store`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from onecopy.comm.backends import accelerated_by, time_limit
from onecopy.comm.transport import Peers

SHARE: Final = 0.8
"""Of the process group's limit, after which a collective that still stands is named."""

_LOOKS: Final = 50
"""Looks within the limit; one in ten seconds at most."""

_log = logging.getLogger("onecopy")


class Underway(Protocol):
    """A collective's wait, on a device."""

    @property
    def is_over(self) -> bool: ...


class Store(Protocol):
    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Monitor:
    """Watches the collectives of one group, of which every rank has the same ones in the same order.

    Args:
        rank: this rank's place.
        ranks: the global rank at each place.
        store: one that all of them reach.
        limit: seconds that a collective may take.
    """

    def __init__(self, rank: int, ranks: Sequence[int], store: Store, limit: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._limit = limit
        self._come = 0
        self._latest = "none"
        self._noted = -1
        self._underway: deque[tuple[int, str, Underway, float]] = deque()
        self._told = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._look_on, name="onecopy-monitor", daemon=True).start()

    def come_to(self, subject: str) -> int:
        """This rank's program has come to a collective. Returns its number, from 1."""
        self._come += 1
        self._latest = subject
        return self._come

    def watch(self, number: int, subject: str, underway: Underway) -> None:
        """The stream that computes waits for that collective now."""
        with self._lock:
            self._forget_ended()
            self._underway.append((number, subject, underway, time.monotonic()))

    def _look_on(self) -> None:
        while True:
            time.sleep(min(10.0, self._limit / _LOOKS))
            try:
                self._look()
            except RuntimeError:
                # The store has gone, and with it the job.
                return

    def _look(self) -> None:
        if self._noted != self._come:
            self._noted = self._come
            self._store.set(self._key(self._rank), f"{self._come} {self._latest}")
        with self._lock:
            # Earlier the device is not asked: another thread's questions would spoil the recording of a CUDA graph.
            if self._oldest_stood() < SHARE * self._limit:
                return
            self._forget_ended()
            if (stood := self._oldest_stood()) < SHARE * self._limit:
                return
            number, subject, *_ = self._underway[0]
        if number > self._told:
            self._told = number
            _log.error("%s", self._describe(number, subject, stood))

    def _oldest_stood(self) -> float:
        """Seconds since the stream began to wait for the oldest collective that is not known to have ended."""
        return time.monotonic() - self._underway[0][3] if self._underway else 0.0

    def _forget_ended(self) -> None:
        while self._underway and self._underway[0][2].is_over:
            self._underway.popleft()

    def _describe(self, number: int, subject: str, stood: float) -> str:
        missing = []
        for place, rank in enumerate(self._ranks):
            come, latest = self._note_of(place)
            if come < number:
                missing.append(f"rank {rank} has not come to it; it is {number - come} behind, at {latest}")
        who = "; ".join(missing) or "all ranks have come to it: a device or a link hangs"
        return (
            f"{subject}, number {number} of its group, has stood still for {stood:.1f} s on this device: {who}. At "
            f"{self._limit:.0f} s the process group gives it up, and as a rule ends the process."
        )

    def _note_of(self, place: int) -> tuple[int, str]:
        key = self._key(place)
        if place == self._rank or not self._store.check([key]):
            return (self._come, self._latest) if place == self._rank else (0, "none")
        come, _, latest = self._store.get(key).decode().partition(" ")
        return int(come), latest

    def _key(self, place: int) -> str:
        return f"onecopy/come/{'-'.join(map(str, self._ranks))}/{place}"


_monitors: Final[WeakKeyDictionary[dist.ProcessGroup, Monitor]] = WeakKeyDictionary()


def monitor_of(peers: Peers) -> Monitor | None:
    """The monitor of a group's collectives on an accelerator; None if it has none there."""
    if accelerated_by(peers.group) is None:
        return None
    monitor = _monitors.get(peers.group)
    if monitor is None:
        limit = time_limit(peers.group).total_seconds()
        store = _get_default_store()
        monitor = _monitors[peers.group] = Monitor(peers.rank, peers.ranks, store, limit)
    return monitor
