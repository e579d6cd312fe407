"""Copies between a device and host memory, on streams of their own, without the host's waiting.

    device, stream that computes    reduce ──┐            ┌──▶ gather, as soon as its own bucket is there
    device, stream of copies out             └▶ to host   │
    host                            optimizer's step ─────┤
    device, stream of copies back                         └─ from host, one bucket after the other

A device that has copied little is not run ahead of: two copies to the host at most wait on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

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
        self.device = device
        self._booking = booking
        self._out = torch.Stream(device)
        self._back = torch.Stream(device)
        self._under_way: deque[tuple[torch.Event, Tensor]] = deque()

    def to_host(self, source: Tensor, into: Tensor) -> torch.Event:
        """Begin to copy ``source`` into pinned memory. Returns what has happened when it is there."""
        self._booking("to host", source.nbytes)
        with self._beside(self._out) as event:
            into.copy_(source, non_blocking=True)
        # Its memory is used again by the stream that computes, which therefore waits for copies that lag behind.
        self._under_way.append((event, source))
        while len(self._under_way) > _UNDER_WAY:
            earlier, _ = self._under_way.popleft()
            self.wait(earlier)
        return event

    def from_host(self, source: Tensor, into: Tensor, *, may_go: bool) -> torch.Event:
        """Begin to copy pinned memory into ``into``, which nobody uses before `wait`.

        Args:
            may_go: ``into`` may be dropped before anybody waits.
        """
        self._booking("from host", source.nbytes)
        with self._beside(self._back) as event:
            into.copy_(source, non_blocking=True)
        if may_go:
            into.record_stream(self._back)
        return event

    def wait(self, event: torch.Event) -> None:
        """Let what computes from now on wait for a copy."""
        torch.accelerator.current_stream(self.device).wait_event(event)

    def wait_for_sources(self) -> None:
        """Let what computes from now on wait for all copies to the host: it may change what was copied."""
        for event, _ in self._under_way:
            self.wait(event)
        self._under_way.clear()

    @contextmanager
    def _beside(self, stream: torch.Stream) -> Iterator[torch.Event]:
        """A stream of copies, after all that the stream which computes has been given so far."""
        event = torch.Event(self.device)
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            yield event
            event.record(stream)
