"""Guest: the launcher of a host that is not the first. It carries out what the first one's says (`hosts.py`).

It ends when that one does, and its processes with it: the store with which ranks meet is there, and without it nothing
can be repaired.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from onecopy.resilience.forks import Forks
from onecopy.resilience.lines import BEAT, Lines
from onecopy.resilience.membership import ADDRESS
from onecopy.version import __version__

_A_TRY: Final = 0.2
"""Seconds between two tries to connect."""

_ENVIRONMENT: Final = (ADDRESS, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What the first host says of a process. Everything else is this host's."""


@dataclass(frozen=True)
class Place:
    """Where this host is to be.

    Attributes:
        endpoint: host and port of the first host's launcher.
        number: of this host.
        hosts: how many there are.
        ranks: of each.
        patience: seconds for which the first host may not be there.
    """

    endpoint: tuple[str, int]
    number: int
    hosts: int
    ranks: int
    patience: float


class Guest:
    """Starts and ends what the first host says, to the end of the job."""

    def __init__(self, place: Place, forks: Forks, arguments: Sequence[str]) -> None:
        self._place = place
        self._forks = forks
        self._arguments = arguments
        self._signals: list[int] = []

    def run(self) -> int:
        """Returns the job's exit code; 1 if the first host is lost or not to be found, 2 if it refuses this one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            connection = self._connect()
            if connection is None:
                return 1
            lines = Lines(connection)
            try:
                return self._serve(lines)
            finally:
                lines.close()
        finally:
            self._forks.close()

    def _connect(self) -> socket.socket | None:
        host, port = self._place.endpoint
        until = time.monotonic() + self._place.patience
        while True:
            try:
                return socket.create_connection((host, port), timeout=max(_A_TRY, until - time.monotonic()))
            except OSError as error:
                if self._signals:
                    return None
                if time.monotonic() > until:
                    self._say(
                        f"the first host's launcher cannot be reached at {host}:{port} ({error.strerror or error}) for "
                        f"{self._place.patience:.0f} s: it is started with --node-rank 0 and the same --rdzv-endpoint"
                    )
                    return None
            time.sleep(_A_TRY)

    def _serve(self, lines: Lines) -> int:
        place = self._place
        lines.send(host=place.number, hosts=place.hosts, ranks=place.ranks, version=__version__)
        beaten = time.monotonic()
        while True:
            sources: list[Any] = [lines, self._forks]
            ready = select.select(sources, [], [], BEAT / 2)[0]
            while self._signals:
                lines.send(signal=int(self._signals.pop(0)))
            if self._forks in ready:
                answers = self._forks.answers(0.0)
                if answers is None:
                    self._say("the process that starts ranks has ended")
                    return 1
                for answer in answers:
                    lines.send(**answer)
            if time.monotonic() - beaten > BEAT:
                lines.send()
                beaten = time.monotonic()
            if lines not in ready:
                continue
            came = lines.read()
            if came is None:
                host, port = place.endpoint
                self._say(
                    f"the launcher of the first host, at {host}:{port}, has ended or is lost ({lines.why}), and the "
                    "store with it: all ranks end. Start the job again on all hosts; it goes on from the newest "
                    "checkpoint."
                )
                return 1
            for line in came:
                if (code := self._obey(line)) is not None:
                    return code

    def _obey(self, line: dict[str, Any]) -> int | None:
        """Do what the first host says. Returns the exit code once the job is over."""
        if "start" in line:
            environment = {name: str(line["environment"][name]) for name in _ENVIRONMENT}
            self._forks.start(line["start"], 0, environment, self._arguments)
        elif "kill" in line:
            self._forks.kill(line["kill"], int(line["signal"]))
        elif "refused" in line:
            self._say(f"the first host refuses this one: {line['refused']}")
            return 2
        elif "end" in line:
            return int(line["end"])
        return None

    def _say(self, words: str) -> None:
        sys.stderr.write(f"onecopy run, host {self._place.number}: {words}\n")
        sys.stderr.flush()
