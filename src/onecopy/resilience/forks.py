"""Forks: the launcher's end of the zygote (`zygote.py`). It imports no torch, for the zygote is to begin at once.

`Hosts` (`hosts.py`) is the same over several hosts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


class Forks:
    """Has processes forked, and learns of their ends.

    Attributes:
        address: where processes find what listens in this one.
    """

    address = "127.0.0.1"

    def __init__(self) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        command = [sys.executable, "-m", "onecopy.resilience.zygote", str(orders), str(answers)]
        self._zygote = subprocess.Popen(command, pass_fds=(orders, answers))
        os.close(orders)
        os.close(answers)
        self._pending = b""
        self._pids: dict[str, int] = {}
        self._starting: dict[str, int | None] = {}

    def fileno(self) -> int:
        """Readable when there are answers."""
        return self._answers

    def start(self, process: str, host: int, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        """Have a process forked, of that name; ``host`` is 0, this one."""
        self._starting[process] = None
        order = {"process": process, "environment": dict(environment), "arguments": list(arguments)}
        os.write(self._orders, (json.dumps(order) + "\n").encode())

    def kill(self, process: str, number: int = signal.SIGKILL) -> None:
        """Send a process a signal, if it still runs; one that is about to begin gets it then."""
        if process in self._starting:
            self._starting[process] = number
        if pid := self._pids.get(process):
            # Its number is not given to another process before the zygote has read how it ended.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def missing(self) -> dict[int, float]:
        """Seconds since which hosts are not there: this one is."""
        return {}

    def answers(self, seconds: float) -> list[dict[str, Any]] | None:
        """What has happened within so many seconds; None if the zygote has ended.

        Each has a "process", and its "pid" where it has begun or its exit "code" where it has ended.
        """
        if not select.select([self._answers], [], [], seconds)[0]:
            return []
        if not (came := os.read(self._answers, 1 << 16)):
            return None
        *lines, self._pending = (self._pending + came).split(b"\n")
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if "pid" in answer:
                self._pids[answer["process"]] = answer["pid"]
                if (number := self._starting.pop(answer["process"], None)) is not None:
                    self.kill(answer["process"], number)
            elif "code" in answer:
                self._pids.pop(answer["process"], None)
        return answers

    def close(self, code: int = 1) -> None:
        """End the zygote, and with it all that it has forked. ``code``: of the job."""
        os.close(self._orders)
        self._zygote.wait()
        os.close(self._answers)
