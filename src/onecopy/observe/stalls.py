"""Stall: how long a device's stream stood still for a collective. Known once the device has got there.

The host only launches: what it spends on a collective says nothing of the device. So a wait of the stream that computes
is put between two events of that stream, and whoever wants to know asks later. Nobody waits for the answer.
"""

from __future__ import annotations

from typing import Self

import torch


class Stall:
    """A wait of the stream that computes on ``device``: what is launched inside the `with` block."""

    __slots__ = ("_after", "_before", "_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.Event(device, enable_timing=True)
        self._after = torch.Event(device, enable_timing=True)

    def __enter__(self) -> Self:
        torch.accelerator.current_stream(self._device).record_event(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        torch.accelerator.current_stream(self._device).record_event(self._after)

    @property
    def is_over(self) -> bool:
        """Whether the device has come to its end."""
        return bool(self._after.query())

    @property
    def seconds(self) -> float:
        """How long it took; only when it is over."""
        return float(self._before.elapsed_time(self._after)) / 1e3
