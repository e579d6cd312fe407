"""The scale of the loss under fp16, which follows overflows as DeepSpeed's does."""

from __future__ import annotations

from typing import Any

from onecopy.compat.deepspeed.config import LossScale


class Scaler:
    """Multiplies losses, and learns from each step whether that was too much.

    Attributes:
        scale: now.
    """

    def __init__(self, settings: LossScale) -> None:
        self._settings = settings
        self.scale = float(settings.static or 2**settings.power)
        self._left = settings.hysteresis
        self._steps = 0
        self._last_overflow = -1

    def update(self, *, overflow: bool) -> None:
        """A step was made, or was skipped since a gradient was not finite."""
        settings = self._settings
        if settings.static:
            return
        if overflow:
            if self._left <= 1:
                self.scale = max(self.scale / 2, settings.least)
            else:
                self._left -= 1
            self._last_overflow = self._steps
        else:
            if settings.consecutive:
                self._left = settings.hysteresis
            if (self._steps - self._last_overflow) % settings.window == 0:
                self._left = settings.hysteresis
                self.scale *= 2
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "_left", "_steps", "_last_overflow")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
