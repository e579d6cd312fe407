"""The meter: live bytes by category, counted where the engine allocates and frees, with the peak of each phase.

It counts tensors' bytes, which is what formulas speak of; what the process holds beyond that (the allocator's free
lists, Python, libraries) is the difference to the resident set or to the CUDA allocator, and is shown beside it.
Activations are counted only inside `onecopy.profile`, for that needs a look at every tensor that autograd saves;
activation checkpoints that onecopy keeps are always counted. What it moves to host memory or to files stands apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from onecopy.observe.categories import CATEGORIES
from onecopy.observe.ledger import Ledger, Phase

ON_DISK: Final = "on disk"
IN_HOST_MEMORY: Final = "in host memory"


class Meter:
    """Bytes that one sharded model holds on this rank.

    Attributes:
        live: bytes by category, now.
        peaks: for each phase the categories at the moment when their sum was largest.
        off_device: bytes by category that were moved to host memory or to files; no part of ``live``.
        off_device_peak: the most that each of these was since the last `reset_peaks`.
        listener: called after every change while a profile runs.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peaks: dict[Phase, dict[str, int]] = {}
        self.off_device: dict[str, int] = {}
        self.off_device_peak: dict[str, int] = {}
        self.listener: Callable[[], None] | None = None
        self._ledger = ledger
        self._total = 0
        self._highest: dict[Phase, int] = {}

    def add(self, category: str, nbytes: int) -> None:
        """Count ``nbytes`` more (or, if negative, less) in ``category``."""
        self.live[category] += nbytes
        self._total += nbytes
        if nbytes >= 0 and self._total > self._highest.get(self._ledger.phase, -1):
            self._highest[self._ledger.phase] = self._total
            self.peaks[self._ledger.phase] = dict(self.live)
        if self.listener is not None:
            self.listener()

    def mark(self) -> None:
        """A phase begins: what is live counts towards its peak, also if nothing is added."""
        self.add("communication", 0)

    def add_off_device(self, category: str, nbytes: int, where: str | None = None) -> None:
        """Count ``nbytes`` more or less of ``category`` in host memory or in files.

        Args:
            where: `ON_DISK` or `IN_HOST_MEMORY`, which make a row of their own; None: the one of ``category``.
        """
        category = category if where is None else f"{category}, {where}"
        held = self.off_device[category] = self.off_device.get(category, 0) + nbytes
        self.off_device_peak[category] = max(self.off_device_peak.get(category, 0), held)

    def set(self, category: str, nbytes: int) -> None:
        """Say how much ``category`` holds now."""
        self.add(category, nbytes - self.live[category])

    def set_off_device(self, category: str, nbytes: int, where: str) -> None:
        """Say how much ``category`` holds there now."""
        self.add_off_device(category, nbytes - self.off_device.get(f"{category}, {where}", 0), where)

    @property
    def total(self) -> int:
        """Live bytes of all categories."""
        return self._total

    @property
    def peak(self) -> dict[str, int]:
        """The categories at the moment of the highest sum since the last `reset_peaks`."""
        return max(self.peaks.values(), key=lambda peak: sum(peak.values()), default=dict(self.live))

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is live."""
        self.peaks = {}
        self._highest = {}
        self.off_device_peak = dict(self.off_device)

    def table(self) -> str:
        """Live bytes and each phase's peak, as lines of text, beside what the process holds."""
        columns: dict[str, Mapping[str, int]] = {"now": self.live}
        columns.update(self.peaks.items())
        rows = [f"{'bytes':<22}" + "".join(f"{name:>16}" for name in columns)]
        rows += [f"{c:<22}" + "".join(f"{column[c]:>16,}" for column in columns.values()) for c in CATEGORIES]
        rows.append(f"{'sum':<22}" + "".join(f"{sum(column.values()):>16,}" for column in columns.values()))
        moved = {name if "," in name else f"{name}, off device": nbytes for name, nbytes in self.off_device.items()}
        rows += [f"{name:<33}{nbytes:>16,}" for name, nbytes in moved.items()]
        process = process_memory()
        process |= beside(self.total, process)
        rows += [f"{name:<22}{value:>16,}" for name, value in process.items()]
        return "\n".join(rows)


def beside(counted: int, process: Mapping[str, int]) -> dict[str, int]:
    """What memory goes to that is in no category.

    Args:
        counted: bytes of all categories.
        process: as `process_memory` returns it.

    Returns:
        Bytes: ``other`` are tensors that the engine does not see, on CUDA, where ``fragmentation`` is what the
        allocator has reserved beyond all tensors; on the CPU all that is resident beyond what was counted.
    """
    if "allocated" in process:
        allocated = process["allocated"]
        return {"other": allocated - counted, "fragmentation": process["reserved"] - allocated}
    return {"other": process["resident"] - counted} if "resident" in process else {}


def process_memory() -> dict[str, int]:
    """Bytes that the process holds as the system sees it, for what is known here.

    Returns:
        ``resident`` and ``cgroup_limit`` on Linux; ``allocated`` and ``reserved`` of the CUDA allocator.
    """
    found: dict[str, int] = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        found["resident"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if (limit := cgroup_limit()) is not None:
        found["cgroup_limit"] = limit
    if torch.cuda.is_available():
        statistics = torch.cuda.memory_stats()
        found["allocated"] = statistics.get("allocated_bytes.all.current", 0)
        found["reserved"] = statistics.get("reserved_bytes.all.current", 0)
    return found


def cgroup_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that this process's control group may hold, or one around it, if that is less; None without a limit.

    Args:
        groups: where control groups of either version are mounted.
        own: the groups of the process, one a line, "number:controllers:path". A container may know its group's path on
            the host and see its own as the root; then the path is not there, and what is above it counts.
    """
    limits = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        root, name = groups, "memory.max"
        if controllers:
            root, name = groups / "memory", "memory.limit_in_bytes"
        if controllers in ("", "memory"):
            place = root / path.strip("/")
            around = [folder / name for folder in (place, *place.parents) if folder.is_relative_to(root)]
            limits += [limit.read_text().strip() for limit in around if limit.exists()]
    # No limit is "max", or in version 1 a number close to 2^63.
    return min((int(text) for text in limits if text.isdigit() and int(text) < 2**60), default=None)
