"""Groups: one memory control group for each rank of a probe, where the user has named a place for them.

The kernel then holds each rank to its limit whatever it allocates by, and ends it if it takes more.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from onecopy.errors import SettingsError
from onecopy.tuner.probe.order import Limits


class Group:
    """Control groups of one probe's ranks.

    Args:
        place: a directory of control groups, of version 1 (of the memory controller) or 2, in which groups may be made.
        limit: bytes of each rank.
    """

    def __init__(self, place: Path, limit: int, ranks: int) -> None:
        self._version_2 = (place / "cgroup.controllers").exists()
        self._groups = [place / f"onecopy-{os.getpid()}-{number}" for number in range(ranks)]
        try:
            if self._version_2 and "memory" not in (place / "cgroup.subtree_control").read_text().split():
                (place / "cgroup.subtree_control").write_text("+memory")
            for group in self._groups:
                group.mkdir(exist_ok=True)
                (group / ("memory.max" if self._version_2 else "memory.limit_in_bytes")).write_text(str(limit))
        except OSError as error:
            self.remove()
            raise SettingsError(
                f"no memory control group can be made in {str(place)!r}: {error.strerror}; leave control_group out to "
                f"limit probes by RLIMIT_DATA"
            ) from None

    def enter(self, number: int) -> None:
        """Put this process into the group of rank ``number``."""
        (self._groups[number] / "cgroup.procs").write_text(str(os.getpid()))

    def ran_out(self) -> bool:
        """Whether the kernel has ended a rank for its memory."""
        return any(self._kills(group) for group in self._groups)

    def _kills(self, group: Path) -> int:
        events = group / ("memory.events" if self._version_2 else "memory.oom_control")
        rows = dict(row.split()[:2] for row in events.read_text().splitlines() if " " in row)
        return int(rows.get("oom_kill", 0))

    def remove(self) -> None:
        """Remove the groups; the kernel may need a moment after their last process."""
        for group in self._groups:
            for _ in range(20):
                with suppress(FileNotFoundError):
                    try:
                        group.rmdir()
                    except OSError:
                        time.sleep(0.05)
                        continue
                break


def make_group(limits: Limits, ranks: int) -> Group | None:
    """Groups for a probe whose limits ask for them."""
    if not limits.control_group or limits.memory is None:
        return None
    return Group(Path(limits.control_group), limits.memory, ranks)
