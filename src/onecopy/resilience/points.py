"""Points: names of the moments of a step and of a recovery, told to whoever wants to know where a rank is.

A step passes "reduced", "sent", "agree", "agreed", "half", "applied"; a recovery "lost", "meeting", "met", "vote",
"caught up", "states", "settled", and before "states", where slices are cut anew, "drafted" and "switched"; the top of a
loop "user", "user sent". The kill test (`benchmarks/recovery.py`) ends ranks there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

observers: Final[list[Callable[[str], None]]] = []


def reach(point: str) -> None:
    """This rank has come to ``point``."""
    for observer in observers:
        observer(point)
