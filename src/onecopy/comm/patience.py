"""Patience: a rank that waits long says so once, in its log, while it goes on waiting.

The process group's time limit ends a wait, after minutes as a rule. Long before, somebody who looks at the log wants to
know which rank waits, for what, and for whom. A thread looks at the wait that is going on every second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

SECONDS: Final = 10.0
"""How long a wait may take before it is logged."""

_A_LOOK: Final = 1.0

nudges: Final[list[Callable[[object], None]]] = []
"""Called at each look at a wait that is in vain if its peer is leaving (`presence.py`), with the wait's subject."""

_log = logging.getLogger("onecopy")


class _Watch:
    """Looks at what threads wait for."""

    def __init__(self) -> None:
        self.waits: dict[int, patience] = {}
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._look, name="onecopy-patience", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(_A_LOOK)
            for wait in list(self.waits.values()):
                wait.tell()


_watch: Final = _Watch()


class patience:
    """Log once if the block takes longer than `SECONDS`.

    Args:
        describe: called with ``subject``, makes the message; only if there is one.
        subject: handed to ``describe``; the global rank that is waited for, None for all of them.
        may_be_in_vain: whether a rank that has come to the end of its program cannot end this wait.
    """

    __slots__ = ("_describe", "_may_be_in_vain", "_since", "_subject", "_told")

    def __init__(self, describe: Callable[[object], str], subject: object, *, may_be_in_vain: bool = False) -> None:
        self._describe = describe
        self._subject = subject
        self._may_be_in_vain = may_be_in_vain
        self._told = False
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()
        _watch.waits[threading.get_ident()] = self
        _watch.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _watch.waits.pop(threading.get_ident(), None)

    def tell(self) -> None:
        """Log, if it is time and has not been done; nudge who may be leaving."""
        waited = time.monotonic() - self._since
        if self._may_be_in_vain and waited >= _A_LOOK:
            for nudge in nudges:
                nudge(self._subject)
        if waited >= SECONDS and not self._told:
            self._told = True
            _log.warning("still waiting after %.0f s: %s", waited, self._describe(self._subject))
