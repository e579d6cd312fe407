"""Store: where the kept parts of activation checkpoints lie between forward and backward.

============  ==========================================  =======================================================
``None``      the device                                  nothing is moved
``"cpu"``     host memory, pinned where there is a GPU    copies run beside compute, on two streams of their own
a directory   one file for each, mapped into memory       written and read through the page cache
============  ==========================================  =======================================================

What is kept is fetched in the reverse order of keeping: who fetches what one call has kept begins to fetch what the
call before it kept. A call is what lies between two `end_call`s: one pass through a checkpointed unit.

    computing    keep ─────── the unit computes ─────── end_call (waits for out)      fetch (waits for in)   recompute …
    out                └─ copy to the host ─────────────┘
    in                                                                fetched ahead ─┘
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onecopy.errors import OffloadError, SettingsError, UsageError
from onecopy.observe.meter import Meter

_CATEGORY = "checkpoints"


class Kept(Protocol):
    """A flat tensor in a store. Its bytes are counted as long as it lives."""

    def fetch(self) -> Tensor:
        """The tensor, on its device. May be called more than once."""


class Store(Protocol):
    def keep(self, flat: Tensor) -> Kept:
        """Take the 1-D ``flat``, to which nobody else may write before `end_call`."""

    def end_call(self) -> None:
        """The call whose tensors were kept is over: kernels launched from now on find them taken."""


def make_store(offload: str | os.PathLike[str] | None, meter: Meter) -> Store:
    """The store of that name: None, "cpu" or a directory, which is made if there is none.

    Raises:
        SettingsError: if it is none of these, or the directory cannot be written to.
    """
    check_offload(offload)
    if offload is None:
        return OnDevice(meter)
    return InHostMemory(meter) if offload == "cpu" else InFiles(Path(offload), meter)


def check_offload(offload: str | os.PathLike[str] | None) -> None:
    """Raise `SettingsError` if there is no such store. Makes a directory that is missing."""
    if offload is None or offload == "cpu":
        return
    if not isinstance(offload, str | os.PathLike) or offload in ("gpu", "cuda", "disk", "nvme", ""):
        raise SettingsError(f'offload must be None, "cpu" or the path of a directory; found {offload!r}')
    path = Path(offload)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SettingsError(f"offload cannot write to {str(path)!r}: {error}; give a directory that it can") from None


class OnDevice:
    """Keeps tensors where they are.

    Raises:
        UsageError: from `Kept.fetch`, if the tensor was modified in place meanwhile. Autograd looks for that in tensors
            that it saves itself, and not in what hooks save for it.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def keep(self, flat: Tensor) -> Kept:
        return _OnDevice(flat, self._meter)

    def end_call(self) -> None:
        """Nothing was moved."""


class _OnDevice:
    def __init__(self, flat: Tensor, meter: Meter) -> None:
        self._unchanged = Unchanged(flat)
        meter.add(_CATEGORY, flat.nbytes)
        weakref.finalize(self, meter.add, _CATEGORY, -flat.nbytes)

    def fetch(self) -> Tensor:
        return self._unchanged.get()


class Unchanged:
    """A tensor that nobody may modify in place before it is used again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def get(self) -> Tensor:
        """The tensor; an error if it has changed."""
        if self._tensor._version != self._version:
            raise UsageError(
                f"an input of {self._tensor.numel()} elements of a module or function with activation checkpoints "
                f"was modified in place between its forward and its backward, which computes it again: write "
                f"x = x + y in place of x += y there."
            )
        return self._tensor


class InHostMemory:
    """Copies tensors to host memory, on a device beside what it computes."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lanes: dict[torch.device, _Lanes] = {}

    def keep(self, flat: Tensor) -> Kept:
        if flat.device.type == "cpu":
            return _InHostMemory(flat, self._meter)
        if flat.device not in self._lanes:
            self._lanes[flat.device] = _Lanes(flat.device)
        return _FromDevice(flat, self._lanes[flat.device], self._meter)

    def end_call(self) -> None:
        for lanes in self._lanes.values():
            lanes.end_call()


class _InHostMemory:
    """A copy of a tensor of the CPU."""

    def __init__(self, flat: Tensor, meter: Meter) -> None:
        self._host = _host_memory(flat, meter, self, pinned=False)
        self._host.copy_(flat)

    def fetch(self) -> Tensor:
        return self._host


class _Lanes:
    """A device's two streams for copies, and what was kept by them.

    Attributes:
        out: copies to the host.
        back: copies from it.
        call: what the call that runs now has kept.
        before: what the call before it kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out = torch.Stream(device)
        self.back = torch.Stream(device)
        self.call: list[weakref.ref[_FromDevice]] = []
        self.before: list[weakref.ref[_FromDevice]] = []
        self._leaving: list[Unchanged] = []

    def send(self, flat: Tensor, host: Tensor) -> torch.Event:
        """Copy out. Returns what is recorded behind the copy."""
        self.out.wait_stream(torch.accelerator.current_stream(self.device))
        with self.out:
            host.copy_(flat, non_blocking=True)
        self._leaving.append(Unchanged(flat))
        return self.out.record_event()

    def end_call(self) -> None:
        """Kernels launched from now on may change what was copied out, and have its memory.

        Raises:
            UsageError: if it has been modified in place before, when it was perhaps not copied yet.
        """
        leaving, self._leaving = self._leaving, []
        if leaving:
            torch.accelerator.current_stream(self.device).wait_stream(self.out)
        if self.call:
            self.before, self.call = self.call, []
        for tensor in leaving:
            tensor.get()


class _FromDevice:
    """A copy in pinned host memory of a tensor of a device."""

    def __init__(self, flat: Tensor, lanes: _Lanes, meter: Meter) -> None:
        self._lanes = lanes
        self._before = lanes.before
        self._host = _host_memory(flat, meter, self, pinned=True)
        self._taken = lanes.send(flat, self._host)
        self._arriving: Tensor | None = None
        self._was_fetched = False
        lanes.call.append(weakref.ref(self))

    def fetch(self) -> Tensor:
        self._start()
        self._was_fetched = True
        arrived, self._arriving = self._arriving, None
        assert arrived is not None
        current = torch.accelerator.current_stream(self._lanes.device)
        current.wait_stream(self._lanes.back)
        arrived.record_stream(current)
        for reference in self._before:
            if (before := reference()) is not None and not before._was_fetched:
                before._start()
        return arrived

    def _start(self) -> None:
        """Begin to copy back."""
        if self._arriving is None:
            self._lanes.back.wait_event(self._taken)
            with self._lanes.back:
                self._arriving = self._host.to(self._lanes.device, non_blocking=True)


def _host_memory(flat: Tensor, meter: Meter, kept: object, *, pinned: bool) -> Tensor:
    """Memory for a copy of ``flat``, counted as long as ``kept`` lives."""
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pinned)
    meter.add_off_device(_CATEGORY, host.nbytes)
    weakref.finalize(kept, meter.add_off_device, _CATEGORY, -host.nbytes)
    return host


class InFiles:
    """Copies tensors to files of a directory, which go as soon as the tensors do.

    Raises:
        OffloadError: from `keep`, if there is no room for a file, or the directory is gone.
    """

    def __init__(self, directory: Path, meter: Meter) -> None:
        self._directory = directory
        self._meter = meter

    def keep(self, flat: Tensor) -> Kept:
        return _InFile(flat, self._directory, self._meter)

    def end_call(self) -> None:
        """What was kept is written."""


class _InFile:
    def __init__(self, flat: Tensor, directory: Path, meter: Meter) -> None:
        try:
            handle, self._path = tempfile.mkstemp(prefix="onecopy-checkpoint-", suffix=".bin", dir=directory)
            weakref.finalize(self, Path(self._path).unlink, missing_ok=True)
            _reserve(handle, flat.nbytes)
        except OSError as error:
            raise OffloadError(
                f"offload cannot keep {flat.nbytes:,} bytes of activations in {str(directory)!r}: {error.strerror}; "
                f"make room there or give another directory"
            ) from None
        self._numel, self._dtype, self._device = flat.numel(), flat.dtype, flat.device
        if self._numel:
            self._mapped().copy_(flat)
        meter.add_off_device(_CATEGORY, flat.nbytes)
        weakref.finalize(self, meter.add_off_device, _CATEGORY, -flat.nbytes)

    def fetch(self) -> Tensor:
        if not self._numel:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        mapped = self._mapped()
        return mapped.clone() if self._device.type == "cpu" else mapped.to(self._device)

    def _mapped(self) -> Tensor:
        return torch.from_file(self._path, shared=True, size=self._numel, dtype=self._dtype)


def _reserve(handle: int, nbytes: int) -> None:
    """Give a new file its room, and close it: where a disk is full, writing to mapped memory would kill the process."""
    with os.fdopen(handle, "wb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
