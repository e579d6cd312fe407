"""InHostMemory: activations in host memory, pinned where there is an accelerator (P_a+cpu of ZeRO).

Copies run beside compute, on the same two streams as those of offloaded states:

    computing    keep ─────── the unit computes ─────── end_call (waits for out)    fetch (waits for back)  recompute …
    out                └─ copy to the host ─────────────┘
    back                                                            fetched ahead ─┘
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from onecopy.activations.kept import CATEGORY, Calls, Kept, KeptElsewhere, Unchanged
from onecopy.memory.store.copies import Copies
from onecopy.memory.store.movers import Movers
from onecopy.observe.meter import Meter


class InHostMemory:
    """Copies tensors to host memory, on a device beside what it computes."""

    def __init__(self, meter: Meter, movers: Movers) -> None:
        self._meter = meter
        self._movers = movers
        self._lanes: dict[torch.device, _Lane] = {}

    def keep(self, flat: Tensor) -> Kept:
        if flat.device.type == "cpu":
            return _InHostMemory(flat, self._meter)
        if flat.device not in self._lanes:
            self._lanes[flat.device] = _Lane(self._movers.copies(flat.device))
        return _FromDevice(flat, self._lanes[flat.device], self._meter)

    def end_call(self) -> None:
        for lane in self._lanes.values():
            lane.end_call()


class _InHostMemory:
    """A copy of a tensor of the CPU."""

    def __init__(self, flat: Tensor, meter: Meter) -> None:
        self._host = _host_memory(flat, meter, self, pinned=False)
        self._host.copy_(flat)

    def fetch(self) -> Tensor:
        return self._host


class _Lane:
    """What was kept of one device.

    Attributes:
        copies: between it and the host.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.calls = Calls()
        self._leaving: list[Unchanged] = []

    def send(self, flat: Tensor, host: Tensor) -> torch.Event:
        """Copy out. Returns what has happened when it is there."""
        self._leaving.append(Unchanged(flat))
        return self.copies.to_host(flat, host)

    def end_call(self) -> None:
        """Kernels launched from now on may change what was copied out, and have its memory.

        Raises:
            UsageError: if it has been modified in place before, when it was perhaps not copied yet.
        """
        leaving, self._leaving = self._leaving, []
        if leaving:
            self.copies.wait_for_sources()
        self.calls.end()
        for tensor in leaving:
            tensor.get()


class _FromDevice(KeptElsewhere):
    """A copy in pinned host memory of a tensor of a device."""

    def __init__(self, flat: Tensor, lane: _Lane, meter: Meter) -> None:
        super().__init__(lane.calls)
        self._copies = lane.copies
        self._host = _host_memory(flat, meter, self, pinned=True)
        self._taken = lane.send(flat, self._host)
        self._arriving: tuple[Tensor, torch.Event] | None = None

    def start(self) -> None:
        if self._arriving is None:
            self._copies.wait(self._taken)
            arriving = torch.empty_like(self._host, device=self._copies.device)
            self._arriving = arriving, self._copies.from_host(self._host, arriving, may_go=True)

    def finish(self) -> Tensor:
        assert self._arriving is not None
        (arrived, event), self._arriving = self._arriving, None
        self._copies.wait(event)
        return arrived


def _host_memory(flat: Tensor, meter: Meter, kept: object, *, pinned: bool) -> Tensor:
    """Memory for a copy of ``flat``, counted as long as ``kept`` lives."""
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pinned)
    meter.add_off_device(CATEGORY, host.nbytes)
    weakref.finalize(kept, meter.add_off_device, CATEGORY, -host.nbytes)
    return host
