"""Stop: a signal becomes a request that the loop honours between two steps, on every rank alike."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside its block the first signal is a request to stop; a second one does what it did before the block.

    The end of the process that started this one is a request too: a rank must not outlive its launcher.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def made(self) -> bool:
        """Whether this rank should stop."""
        return self._signalled or os.getppid() != self._parent

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
