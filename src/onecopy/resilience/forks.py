"""Forks: the launcher's end of the zygote (`zygote.py`). It imports no torch, for the zygote is to begin at once."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Forks:
    """Has processes forked, and learns of their ends."""

    def __init__(self) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        command = [sys.executable, "-m", "onecopy.resilience.zygote", str(orders), str(answers)]
        self._zygote = subprocess.Popen(command, pass_fds=(orders, answers))
        os.close(orders)
        os.close(answers)
        self._pending = b""

    def start(self, process: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        """Have a process forked, of that name."""
        order = {"process": process, "environment": dict(environment), "arguments": list(arguments)}
        os.write(self._orders, (json.dumps(order) + "\n").encode())

    def answers(self, seconds: float) -> list[dict[str, Any]] | None:
        """What has happened within so many seconds; None if the zygote has ended."""
        if not select.select([self._answers], [], [], seconds)[0]:
            return []
        if not (came := os.read(self._answers, 1 << 16)):
            return None
        *lines, self._pending = (self._pending + came).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the zygote, and with it all that it has forked."""
        os.close(self._orders)
        self._zygote.wait()
        os.close(self._answers)
