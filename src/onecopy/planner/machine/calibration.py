"""Calibration: how far the planner's constants were off on this machine, as `onecopy tune` has measured.

One small file for each machine, in the user's cache directory. `onecopy plan --here` takes it into account.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch

from onecopy.planner.formulas.calibrated import balance_factor
from onecopy.planner.machine.machine import Machine

FACTORS: Final = ("compute", "memory", "link", "latency", "transfer")
"""What `Machine` has a constant for, in seconds: computing, passes over memory, messages by bytes and by number, and
transfers off the device."""


@dataclass(frozen=True)
class Calibration:
    """Factors by which the machine takes longer, or holds more, than the planner would say without them.

    Attributes:
        compute, memory, link, latency, transfer: of seconds, see `FACTORS`.
        overhead: seconds of one micro-batch that no constant of `Machine` stands for.
        states: of the bytes of tensors other than activations.
        activations: of the bytes of activations.
        base: bytes that a process holds before a model is built.
        probes: measurements behind it.
        peak, memory_bandwidth, intra: of `Gpu`, as they were seen of ``on_ranks`` ranks when the factors were measured.
            They stand for what a later short look at the machine sees, whose noise factors must not inherit; 0 where
            they are not known.
    """

    compute: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    latency: float = 1.0
    transfer: float = 1.0
    overhead: float = 0.0
    states: float = 1.0
    activations: float = 1.0
    base: float = 0.0
    probes: float = 0
    peak: float = 0.0
    memory_bandwidth: float = 0.0
    intra: float = 0.0
    on_ranks: float = 0

    def of(self, machine: Machine) -> Calibration:
        """The same, with the machine's constants beside the factors, unless others are there already."""
        if self.on_ranks:
            return self
        gpu = machine.gpu
        return replace(
            self, peak=gpu.peak, memory_bandwidth=gpu.memory_bandwidth, intra=gpu.intra, on_ranks=machine.gpus
        )

    def applied(self, machine: Machine) -> Machine:
        """The machine with its constants corrected."""
        gpu = machine.gpu
        if self.on_ranks:
            # Ranks on the CPU share its cores.
            share = self.on_ranks / machine.gpus if machine.computes_on_host else 1.0
            gpu = gpu._replace(peak=self.peak * share, memory_bandwidth=self.memory_bandwidth, intra=self.intra)
        return replace(
            machine,
            gpu=gpu._replace(
                peak=gpu.peak / self.compute,
                memory_bandwidth=gpu.memory_bandwidth / self.memory,
                host=gpu.host / self.transfer,
                intra=gpu.intra / self.link,
                # It must not follow the balance of peak and bandwidth, which are corrected on their own.
                reach=gpu.reach or balance_factor(gpu.peak, gpu.memory_bandwidth),
            ),
            host_bandwidth=machine.host_bandwidth / self.transfer,
            nvme_bandwidth=machine.nvme_bandwidth / self.transfer,
            link=machine.link / self.link,
            latency=machine.latency * self.latency,
            # The planner has one share for all tensors: that of those which grow most.
            slack=max(self.states, self.activations) - 1,
            context=self.base or machine.context,
        )

    def words(self) -> str:
        """In one line."""
        named = ", ".join(f"{name} × {getattr(self, name):.2f}" for name in FACTORS)
        return f"{named}; memory of states × {self.states:.2f}, of activations × {self.activations:.2f}"


def place() -> Path:
    """The file of this machine: below XDG_CACHE_HOME, or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "onecopy" / f"calibration-{_fingerprint()}.json"


def read_calibration() -> Calibration | None:
    """This machine's; None if nothing was measured here, or the file cannot be understood."""
    try:
        values: dict[str, Any] = json.loads(place().read_text(encoding="utf-8"))
        known = {field.name for field in fields(Calibration)}
        return Calibration(**{name: float(value) for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_calibration(found: Calibration) -> Path | None:
    """Keep it for this machine. Returns the file; None where nothing can be written, which is no reason to fail."""
    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return None
    return path


def _fingerprint() -> str:
    """What makes a machine another one to a training: processor, cores, memory, accelerators, and torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}) else 0
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = (platform.machine(), platform.processor(), cores, pages, names, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
