"""OnDisk: activations in the same file, through the same pool of memory and the same threads as offloaded states.

What is kept is copied into the pool and written beside what computes; what the call before has kept is read into the
pool while this one is computed again. Where the pool is full, who keeps waits for what was kept earlier to be written;
where others have all of it, bytes move straight between the file and the tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial

import torch
from torch import Tensor

from onecopy.activations.kept import CATEGORY, Calls, Kept, KeptElsewhere
from onecopy.memory.store.files import File, Transfer
from onecopy.memory.store.pages import Page
from onecopy.memory.store.pool import SLOTS, Pool
from onecopy.observe.meter import Meter


class OnDisk:
    """Keeps tensors in a file.

    Raises:
        OffloadError: from `keep`, if the disk has no room, or could not write what was kept before; from `Kept.fetch`,
            if it could not be written or read.
    """

    def __init__(self, file: File, pool: Pool, meter: Meter) -> None:
        self._file = file
        self._pool = pool
        self._count = partial(meter.add_off_device, CATEGORY)
        self._calls = Calls()
        self._writing: deque[weakref.ref[Page]] = deque()

    def __deepcopy__(self, memo: object) -> OnDisk:
        """Itself: a copy of a module keeps what it computes in the same file."""
        return self

    def keep(self, flat: Tensor) -> Kept:
        page = Page(self._file, flat.numel(), flat.dtype, count=self._count, zeroed=False)
        if len(self._writing) >= SLOTS:
            self._await_oldest()
        self._pool.allow(SLOTS * Pool.room_for([page.nbytes]))
        while (memory := self._pool.take_now(page.nbytes)) is None and self._writing:
            self._await_oldest()
        if memory is None:
            page.store(flat)
            page.wait()
        else:
            _elements(memory, page).copy_(flat)
            page.is_changed = True
            page.put_away(memory, partial(self._pool.give, memory))
            self._writing.append(weakref.ref(page))
        return _OnDisk(page, flat.device, self._pool, self._calls)

    def end_call(self) -> None:
        # What was kept was copied.
        self._calls.end()

    def _await_oldest(self) -> None:
        page = self._writing.popleft()()
        if page is not None:
            page.wait()


class _OnDisk(KeptElsewhere):
    """A page of the file, of a tensor of ``device``."""

    def __init__(self, page: Page, device: torch.device, pool: Pool, calls: Calls) -> None:
        super().__init__(calls)
        self._page = page
        self._device = device
        self._pool = pool
        self._arriving: tuple[Tensor, Transfer] | None = None

    def __del__(self) -> None:
        if self._arriving is not None:
            memory, transfer = self._arriving
            transfer.then(partial(self._pool.give, memory))

    def start(self) -> None:
        if self._arriving is not None:
            return
        self._page.wait()
        if (memory := self._pool.take_now(self._page.nbytes)) is not None:
            self._arriving = memory, self._page.fetch(_elements(memory, self._page))

    def finish(self) -> Tensor:
        page = self._page
        if self._arriving is None:
            arrived = torch.empty(page.numel, dtype=page.dtype)
            page.fetch(arrived).wait()
            return arrived.to(self._device)
        (memory, transfer), self._arriving = self._arriving, None
        try:
            transfer.wait()
            return _elements(memory, page).to(self._device, copy=True)
        finally:
            self._pool.give(memory)


def _elements(memory: Tensor, page: Page) -> Tensor:
    return memory[: page.nbytes].view(page.dtype)
