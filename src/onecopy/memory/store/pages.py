"""Page: a 1-D tensor that rests in a file. Pages: those of one bucket, which are brought and put away together.

    master | gradient | one for each state of the optimizer, once there are states

At rest, a few elements of a page can be read and written (`read`, `write`), each time through a copy. A page that was
brought is a tensor in memory, ``at_hand``, until it is put away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onecopy.errors import UsageError
from onecopy.memory.arena import Region
from onecopy.memory.store.files import File, Transfer, round_up


class Page:
    """See the file's first lines.

    Args:
        file: where it rests.
        numel: its elements.
        zeroed: they are zeros at first; otherwise anything.
        count: told of its bytes as they are taken, and of their negative as they are given back.

    Attributes:
        at_hand: its elements while it is in memory, else None.
        is_changed: whether what is at hand was written to since it was brought.
        changes: how often elements were written.
        pages: those to which it belongs; None of a page alone.
    """

    def __init__(
        self,
        file: File,
        numel: int,
        dtype: torch.dtype,
        pages: Pages | None = None,
        count: Callable[[int], None] | None = None,
        *,
        zeroed: bool = True,
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        self.pages = pages
        self.at_hand: Tensor | None = None
        self.is_changed = False
        self.changes = 0
        self._file = file
        self._start = file.extend(self.nbytes, zeroed=zeroed)
        self._under_way: Transfer | None = None
        if count is not None:
            count(self.nbytes)
            weakref.finalize(self, count, -self.nbytes).atexit = False

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            "states that rest on disk are not copied, as torch.distributed.checkpoint.async_save does at first: call "
            "torch.distributed.checkpoint.save, or onecopy.save, which read them one by one."
        )

    def __del__(self) -> None:
        if not self.nbytes or not hasattr(self, "_under_way"):
            return
        give_back = partial(self._file.room.give, self._start, round_up(self.nbytes))
        if self._under_way is None:
            give_back()
        else:
            # Nobody waits for it any more, but what it writes must not meet what comes into its place.
            self._under_way.then(give_back)

    def wait(self) -> None:
        """Wait for what is under way between memory and the file, and raise what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    def bring(self, memory: Tensor) -> Callable[[], None]:
        """Begin to read the page into ``memory`` (uint8, of whole blocks). Returns what waits until it is at hand."""
        self.wait()
        assert self.at_hand is None
        transfer = self._file.read(memory[: round_up(self.nbytes)], self._start)

        def wait() -> None:
            transfer.wait()
            self.at_hand = memory[: self.nbytes].view(self.dtype)
            self.is_changed = False

        return wait

    def put_away(self, memory: Tensor, then: Callable[[], None]) -> None:
        """Write what is at hand in ``memory`` back if it was changed; call ``then`` once the memory is of no use."""
        self.at_hand = None
        if not self.is_changed:
            then()
            return
        self.is_changed = False
        self.changes += 1
        self._under_way = self._file.write(memory[: round_up(self.nbytes)], self._start)
        self._under_way.then(then)

    def store(self, source: Tensor) -> None:
        """Begin to write all elements, which ``source`` (1-D, of any dtype) must keep until `wait`."""
        self.wait()
        self.changes += 1
        self._under_way = self._file.write(_on_host(source, self.dtype), self._start)

    def fetch(self, into: Tensor) -> Transfer:
        """Begin to read all elements into ``into``: contiguous, on the CPU and of the page's dtype."""
        self.wait()
        return self._file.read(into, self._start)

    def read(self, start: int, numel: int) -> Tensor:
        """A copy of some elements."""
        if self.at_hand is not None:
            return self.at_hand[start : start + numel].clone()
        into = torch.empty(numel, dtype=self.dtype)
        if numel:
            self.begin_read(start, into).wait()
        return into

    def begin_read(self, start: int, into: Tensor) -> Transfer:
        """Begin to read elements from ``start`` on; the page is at rest."""
        self.wait()
        return self._file.read(into, self._start + start * self.dtype.itemsize)

    def begin_write(self, start: int, source: Tensor) -> Transfer:
        """Begin to write elements from ``start`` on; the page is at rest."""
        self.wait()
        self.changes += 1
        return self._file.write(_on_host(source, self.dtype), self._start + start * self.dtype.itemsize)

    def write(self, start: int, source: Tensor) -> None:
        """Write elements from ``start`` on."""
        if self.at_hand is not None:
            self.at_hand[start : start + source.numel()].copy_(source)
            self.is_changed = True
        elif source.numel():
            self.begin_write(start, source).wait()

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        """All elements in memory for the length of a block; kept with ``write``."""
        if self.at_hand is not None:
            yield self.at_hand
            self.is_changed |= write
            return
        whole = self.read(0, self.numel)
        yield whole
        if write:
            self.write(0, whole)


class Pages:
    """The pages of one bucket. States are an optimizer's own.

    Args:
        file: where they rest.
        numel: elements of each.
        master, gradient: dtypes of these; None where nothing is trained.
        count: told of a page's bytes, and of which of the meter's categories they are.

    Attributes:
        on_change: called with the master that is at hand when a step has changed it.
        nursery: where new states are to be made while an optimizer's first step runs; None at other times.
    """

    def __init__(
        self,
        file: File,
        numel: int,
        master: torch.dtype,
        gradient: torch.dtype | None,
        count: Callable[[str, int], None] = lambda category, nbytes: None,
    ) -> None:
        self._file = file
        self._numel = numel
        self._count = count
        self.master = self._page(master, "parameters_sliced")
        self.gradient = self._page(gradient, "gradients_sliced") if gradient is not None else None
        self.on_change: Callable[[Tensor], None] | None = None
        self.nursery: Region | None = None
        self._states: WeakKeyDictionary[object, dict[tuple[str, torch.dtype], Page]] = WeakKeyDictionary()

    def state(self, owner: object, name: str, dtype: torch.dtype) -> Page:
        """The page of the state ``name`` that ``owner`` keeps, made at its first use.

        Raises:
            OffloadError: if there is no room for it.
        """
        own = self._states.setdefault(owner, {})
        if (name, dtype) not in own:
            own[name, dtype] = self._page(dtype, "optimizer")
        return own[name, dtype]

    def drop_state(self, owner: object, name: str, dtype: torch.dtype) -> None:
        """Give the room of a state back that ``owner`` has not made, if some was reserved."""
        self._states.get(owner, {}).pop((name, dtype), None)

    def has_state(self, owner: object, name: str, dtype: torch.dtype) -> bool:
        """Whether there is a page for the state ``name`` of ``owner``."""
        return (name, dtype) in self._states.get(owner, {})

    def _page(self, dtype: torch.dtype, category: str) -> Page:
        return Page(self._file, self._numel, dtype, self, partial(self._count, category))

    def states_of(self, owner: object) -> list[Page]:
        """All that ``owner`` keeps."""
        return list(self._states.get(owner, {}).values())


def _on_host(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.detach().to(device="cpu", dtype=dtype).contiguous()
