"""Masters: where a bucket's slice rests, and what of it gathers read.

==================  ==================  ============================  ==========================================
``Offload(...)``    masters rest in     gathers read (``lent``)       written to ``lent``
==================  ==================  ============================  ==========================================
none                the device          the masters                   nothing, they are the same
optimizer           host, or a file     a slice on the device, in     when masters have changed: bucket by bucket
                                        the compute dtype             as a step goes on, else before the next use
and parameters      host, or a file     a slice in host memory or a   likewise; in a file the masters themselves
                                        file, in the compute dtype    where dtypes and directory are the same
==================  ==================  ============================  ==========================================

Frozen buckets have no optimizer: their slice rests where parameters do, and is what gathers read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from onecopy.comm.collective import Collective
from onecopy.memory.store.files import File
from onecopy.memory.store.movers import Movers
from onecopy.memory.store.pages import Page, Pages
from onecopy.memory.store.pool import Pool
from onecopy.observe.meter import IN_HOST_MEMORY, ON_DISK, Meter
from onecopy.sharding.tensor.precision import Dtypes
from onecopy.sharding.tensor.resting import RestingTensor
from onecopy.sharding.tensor.sliced import Slicing

_HOST: Final = torch.device("cpu")
_STORES_UNDER_WAY: Final = 2


@dataclass
class Outbox:
    """Pages that are being written from memory of their own, a few at a time."""

    _under_way: deque[Page] = field(default_factory=deque)

    def store(self, page: Page, source: Tensor) -> None:
        """Begin to write ``source``, which nobody changes any more, to ``page``."""
        while len(self._under_way) >= _STORES_UNDER_WAY:
            self._under_way.popleft().wait()
        page.store(source)
        self._under_way.append(page)

    def wait(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._under_way.popleft().wait()


class Walk(Protocol):
    """A step over pages that are at hand (`setup/paged.py`)."""

    def close(self) -> None:
        """Put them away."""


@dataclass(frozen=True)
class Stores:
    """Where the slices of one model rest.

    Attributes:
        optimizer: the file of masters, optimizer states and gradients; None: host memory.
        parameters: the file of what gathers read; None: host memory if ``parameters_on_host``, else the device.
        meter: where bytes are counted.
        movers: what carries bytes between device, host and files.
        outbox: for what is written beside computing.
        walks: the step that has pages at hand, if there is one.
    """

    optimizer: File | None
    parameters: File | None
    parameters_on_host: bool
    meter: Meter
    movers: Movers
    outbox: Outbox = field(default_factory=Outbox)
    walks: list[Walk] = field(default_factory=list)

    @property
    def pool(self) -> Pool:
        """Memory into which pages are brought."""
        return self.movers.pool


class Fetching:
    """This rank's part of a gather on its way out of a file; then the gather itself, if there are other ranks."""

    def __init__(self, masters: Masters, own: Tensor, gather: Callable[[], Collective | None]) -> None:
        self._arrived = masters.fetch(own)
        self._gather = gather

    def finish(self) -> None:
        """Wait until the whole is there."""
        self._arrived()
        if collective := self._gather():
            collective.finish()


class Masters:
    """One bucket's; see the file's first lines.

    Attributes:
        in_memory: the masters as a tensor; None where they rest in a file.
        pages: where they do; None in memory.
        lent: what gathers read, as a tensor; None where that is in a file.
        lends_copy: that is another tensor than the masters.
    """

    def __init__(self, numel: int, dtypes: Dtypes, device: torch.device) -> None:
        self.pages: Pages | None = None
        self.in_memory: Tensor | None = torch.zeros(numel, dtype=dtypes.master, device=device)
        self.lent: Tensor | None = self.in_memory
        self.lends_copy = False
        self._is_ahead = False

    @property
    def held_bytes(self) -> int:
        """Bytes on the device."""
        assert self.in_memory is not None
        return self.in_memory.nbytes

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        """The masters for the length of a block, kept with ``write``."""
        assert self.in_memory is not None
        yield self.in_memory

    def write_begins(self) -> None:
        """Masters are about to change."""
        self._is_ahead = True

    def lend(self, master: Tensor) -> None:
        """Write ``master``, all of this bucket's, to what gathers read. No rank reads it now."""
        self._is_ahead = False
        if self.lends_copy and self.lent is not None:
            self.lent.copy_(master)

    def catch_up(self, *, stays_behind: bool) -> None:
        """`lend` what has changed, unless that was done. ``stays_behind``: what was announced is still to be made."""
        if self._is_ahead and self.lends_copy:
            with self.opened(write=False) as master:
                self.lend(master)
            self._is_ahead = stays_behind

    def await_lent(self) -> None:
        """What computes from now on may read ``lent``."""

    def fetch(self, into: Tensor) -> Callable[[], None]:
        """Begin to read what gathers read, where that is elsewhere, into ``into``. Returns what waits for it."""
        raise AssertionError

    def resting(self, start: int, slicing: Slicing, on_write: Callable[[], None]) -> RestingTensor:
        """The elements from ``start`` on as a tensor, where they rest in a file."""
        raise AssertionError


class MastersOnHost(Masters):
    """Masters in the host memory of an accelerator, what gathers read beside them or on the device."""

    def __init__(self, numel: int, dtypes: Dtypes, device: torch.device, stores: Stores) -> None:
        self.pages = None
        self._device = device
        self.in_memory = torch.zeros(numel, dtype=dtypes.master, pin_memory=True)
        home = _HOST if stores.parameters_on_host else device
        self.lent = torch.zeros(numel, dtype=dtypes.compute, device=home, pin_memory=home == _HOST)
        self.lends_copy = True
        self.copies = stores.movers.copies(device)
        on_host = self.in_memory.nbytes + (self.lent.nbytes if home == _HOST else 0)
        stores.meter.add_off_device("parameters_sliced", on_host, IN_HOST_MEMORY)
        weakref.finalize(self, stores.meter.add_off_device, "parameters_sliced", -on_host, IN_HOST_MEMORY)
        self._is_ahead = False
        self._copied: torch.Event | None = None

    @property
    def held_bytes(self) -> int:
        return _on_device(self.lent, self._device)

    def write_begins(self) -> None:
        self._is_ahead = True
        if self._copied is not None:
            # What was lent last is still being read from the memory that is about to change.
            self._copied.synchronize()
            self._copied = None

    def lend(self, master: Tensor) -> None:
        assert self.lent is not None
        self._is_ahead = False
        if self.lent.device == _HOST:
            if self._copied is not None:
                self._copied.synchronize()
            self.lent.copy_(master)
        else:
            self._copied = self.copies.from_host(master, self.lent, may_go=True)

    def await_lent(self) -> None:
        if self._copied is not None:
            self.copies.wait(self._copied)

    def fetch(self, into: Tensor) -> Callable[[], None]:
        assert self.lent is not None
        event = self._copied = self.copies.from_host(self.lent, into, may_go=False)
        return partial(self.copies.wait, event)


class MastersInFile(Masters):
    """Masters in a file, what gathers read in another, or in the same, or in memory."""

    def __init__(self, numel: int, dtypes: Dtypes, device: torch.device, stores: Stores, *, trainable: bool) -> None:
        file = stores.optimizer if trainable else stores.parameters
        assert file is not None
        count = partial(_count_on_disk, stores.meter)
        self.pages = Pages(file, numel, dtypes.master, dtypes.accumulate if trainable else None, count)
        self.pages.on_change = self.lend
        self.in_memory = None
        self._lent_changes = 0
        self._stores = stores
        self._device = device
        self._page: Page | None = None
        if stores.parameters is None:
            home = _HOST if stores.parameters_on_host else device
            pinned = home == _HOST and device.type != "cpu"
            self.lent = torch.zeros(numel, dtype=dtypes.compute, device=home, pin_memory=pinned)
        else:
            self.lent = None
            is_master = not trainable or (stores.parameters is file and dtypes.compute == dtypes.master)
            counted = partial(count, "parameters_sliced")
            self._page = (
                self.pages.master if is_master else Page(stores.parameters, numel, dtypes.compute, count=counted)
            )
        self.lends_copy = self._page is not self.pages.master

    @property
    def held_bytes(self) -> int:
        return _on_device(self.lent, self._device)

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        assert self.pages is not None
        with self.pages.master.opened(write=write) as master:
            yield master

    def lend(self, master: Tensor) -> None:
        assert self.pages is not None
        # What is at hand counts as one more change once it is put away.
        self._lent_changes = self.pages.master.changes + self.pages.master.is_changed
        if self.lent is not None:
            self.lent.copy_(master)
        elif self.lends_copy and self._page is not None:
            self._stores.outbox.store(self._page, master.to(self._page.dtype, copy=True))

    def write_begins(self) -> None:
        """Nothing: a page counts its changes."""

    def catch_up(self, *, stays_behind: bool) -> None:
        assert self.pages is not None
        if self.lends_copy and self._lent_changes != self.pages.master.changes:
            with self.opened(write=False) as master:
                self.lend(master)

    def fetch(self, into: Tensor) -> Callable[[], None]:
        page = self._page
        assert page is not None
        if page.dtype == into.dtype and into.device == _HOST:
            return page.fetch(into).wait
        arriving = torch.empty(page.numel, dtype=page.dtype)
        transfer = page.fetch(arriving)

        def wait() -> None:
            transfer.wait()
            into.copy_(arriving)

        return wait

    def resting(self, start: int, slicing: Slicing, on_write: Callable[[], None]) -> RestingTensor:
        assert self.pages is not None
        return RestingTensor(self.pages.master, start, slicing, on_write=on_write)


def _on_device(lent: Tensor | None, device: torch.device) -> int:
    return lent.nbytes if lent is not None and lent.device.type == device.type else 0


def _count_on_disk(meter: Meter, category: str, nbytes: int) -> None:
    meter.add_off_device(category, nbytes, ON_DISK)


def make_masters(
    stores: Stores | None, numel: int, dtypes: Dtypes, device: torch.device, *, trainable: bool
) -> Masters:
    """The masters of one bucket, all zero.

    Args:
        numel: of one slice.
        device: where the bucket computes.
    """
    if stores is None or device.type == "meta":
        return Masters(numel, dtypes, device)
    if (stores.optimizer if trainable else stores.parameters) is not None:
        return MastersInFile(numel, dtypes, device, stores, trainable=trainable)
    if device == _HOST or not (trainable or stores.parameters_on_host):
        return Masters(numel, dtypes, device)
    return MastersOnHost(numel, dtypes, device, stores)
