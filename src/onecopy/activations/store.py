"""Store: where the kept parts of activation checkpoints lie between forward and backward.

============  ==========================================  =======================================================
``None``      the device                                  nothing is moved
``"cpu"``     host memory, pinned where there is a GPU    copies run beside compute, on a stream of their own
a directory   one file for each, mapped into memory       written and read through the page cache
============  ==========================================  =======================================================

What is kept is fetched in the reverse order of keeping: fetching one begins to fetch the one kept before it.
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
        """Take the 1-D ``flat``, which nobody else may write to."""


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
    """Copies tensors to host memory."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._streams: dict[torch.device, torch.Stream] = {}
        self._latest: weakref.ref[_InHostMemory] | None = None

    def keep(self, flat: Tensor) -> Kept:
        stream = None
        if flat.device.type != "cpu":
            stream = self._streams.setdefault(flat.device, torch.Stream(flat.device))
        kept = _InHostMemory(flat, stream, self._latest, self._meter)
        self._latest = weakref.ref(kept)
        return kept


class _InHostMemory:
    """A copy in host memory; ``stream`` carries copies of a device that has any, None copies at once."""

    def __init__(
        self, flat: Tensor, stream: torch.Stream | None, before: weakref.ref[_InHostMemory] | None, meter: Meter
    ) -> None:
        self._device = flat.device
        self._stream = stream
        self._before = before
        self._arriving: Tensor | None = None
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=stream is not None)
        meter.add_off_device(_CATEGORY, self._host.nbytes)
        weakref.finalize(self, meter.add_off_device, _CATEGORY, -self._host.nbytes)
        if stream is None:
            self._host.copy_(flat)
            return
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)

    def fetch(self) -> Tensor:
        if self._stream is None:
            return self._host
        self._start()
        arrived, self._arriving = self._arriving, None
        assert arrived is not None
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        arrived.record_stream(current)
        before = self._before() if self._before is not None else None
        if before is not None:
            before._start()
        return arrived

    def _start(self) -> None:
        """Begin to copy back; in its stream that comes after the copy out."""
        if self._arriving is None and self._stream is not None:
            with self._stream:
                self._arriving = self._host.to(self._device, non_blocking=True)


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
