"""Whether a forward still runs. torch runs no hook when a KeyboardInterrupt ends one: only its frame is gone then."""

from __future__ import annotations

import sys
from types import FrameType

_BETWEEN = ("onecopy.", "torch._dynamo.")


def caller_of_hook() -> FrameType | None:
    """The frame that called the module's hook which is running now, and that is about to call its forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Whether this thread's stack holds ``frame``."""
    running: FrameType | None = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None
