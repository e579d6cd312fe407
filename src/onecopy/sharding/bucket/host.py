"""Host memory as a store: what leaves a device and comes back, on streams of their own, without the host's waiting.

    device, stream that computes    reduce ──┐            ┌──▶ gather, as soon as its own bucket is there
    device, stream of copies                 └▶ to host   │
    host                            optimizer's step ─────┴▶ from host, one bucket after the other

The host waits in two places: when it uses a gradient that is still under way, and when it is about to write to memory
from which a copy is still made. A device that has copied little is not run ahead of: two gradients at most wait on it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from onecopy.observe.meter import IN_HOST_MEMORY
from onecopy.sharding.tensor.awaited import AwaitedTensor
from onecopy.sharding.tensor.narrow import gradient_slice
from onecopy.sharding.tensor.sliced import SlicedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onecopy.sharding.bucket.bucket import Bucket

_UNDER_WAY: Final = 2

Booking = Callable[[str, int], None]
"""Told of a copy that begins: "to host" or "from host", and its bytes."""


class Copies:
    """The copies between one device and host memory.

    Args:
        device: an accelerator.
        booking: told of each.
    """

    def __init__(self, device: torch.device, booking: Booking) -> None:
        self._device = device
        self._booking = booking
        self._stream = torch.Stream(device)
        self._under_way: deque[tuple[torch.Event, Tensor]] = deque()

    def to_host(self, source: Tensor, into: Tensor) -> torch.Event:
        """Begin to copy ``source`` into pinned memory. Returns what has happened when it is there."""
        self._booking("to host", source.nbytes)
        with self._beside() as event:
            into.copy_(source, non_blocking=True)
        # Its memory is used again by the stream that computes, which therefore waits for copies that lag behind.
        self._under_way.append((event, source))
        while len(self._under_way) > _UNDER_WAY:
            earlier, _ = self._under_way.popleft()
            self.wait(earlier)
        return event

    def from_host(self, source: Tensor, into: Tensor, *, stays: bool) -> torch.Event:
        """Begin to copy pinned memory into ``into``, which nobody uses before `wait`.

        Args:
            stays: ``into`` is there as long as the model is, and may be dropped with it before anybody waits.
        """
        self._booking("from host", source.nbytes)
        with self._beside() as event:
            into.copy_(source, non_blocking=True)
        if stays:
            into.record_stream(self._stream)
        return event

    def wait(self, event: torch.Event) -> None:
        """Let what computes from now on wait for a copy."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    @contextmanager
    def _beside(self) -> Iterator[torch.Event]:
        """The stream of copies, after all that the stream which computes has been given so far."""
        event = torch.Event(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield event
            event.record(self._stream)


class HostGradients:
    """One bucket's gradients on their way to host memory, where `p.grad` is.

    The memory is the bucket's own and is used again by the next backward.

    Attributes:
        is_put: gradients are under way that `show` has not shown yet.
    """

    def __init__(self, bucket: Bucket, copies: Copies) -> None:
        self.is_put = False
        self._bucket = bucket
        self._copies = copies
        self._memory: Tensor | None = None
        self._event: torch.Event | None = None

    @torch.no_grad()
    def put(self, reduced: Tensor, present: Sequence[Sequence[SlicedTensor]]) -> None:
        """Copy ``reduced``, the mean of this rank's slice, to the host, with what there is already added to it.

        Args:
            present: for each parameter the gradients that it has.
        """
        self.is_put = True
        if self._memory is None:
            memory = self._memory = torch.empty_like(reduced, device="cpu", pin_memory=True)
            meter = self._bucket.meter
            meter.add_off_device("gradients_sliced", memory.nbytes, IN_HOST_MEMORY)
            weakref.finalize(self, meter.add_off_device, "gradients_sliced", -memory.nbytes, IN_HOST_MEMORY)
        elif self._event is not None:
            self._copies.wait(self._event)
        for found, local in zip(present, self._bucket.split(reduced), strict=True):
            for gradient in found:
                before = gradient.arriving if isinstance(gradient, AwaitedTensor) else gradient.local
                local.add_(before.to(local.device, non_blocking=True))
        self._event = self._copies.to_host(reduced, self._memory)

    def show(self, used: Sequence[bool]) -> None:
        """Let `p.grad` of the parameters that some rank used show what comes."""
        self.is_put = False
        assert self._memory is not None
        assert self._event is not None
        master = self._bucket.dtypes.master
        for entry, local, use in zip(self._bucket.entries, self._bucket.split(self._memory), used, strict=True):
            if use and local.dtype == master:
                entry.sliced.grad = AwaitedTensor(local, entry.sliced.slicing, self._event.synchronize)
            elif use:
                self._event.synchronize()
                entry.sliced.grad = gradient_slice(local, entry.sliced.slicing, master)
