"""Stop: a signal becomes a request that the loop honours between two steps, on every rank alike."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def end_at_once_on_signals() -> None:
    """Let signals end this process in the kernel, without a traceback and even inside a collective."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class StopRequest:
    """Inside its block the first signal is a request to stop; a second one ends the process at once.

    So does the end of the process that started this one: a rank must not outlive its launcher.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()

    @property
    def made(self) -> bool:
        """Whether this rank should stop."""
        return self._signalled or os.getppid() != self._parent

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        end_at_once_on_signals()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        end_at_once_on_signals()
