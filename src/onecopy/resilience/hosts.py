"""Hosts: several hosts as one. The first one's launcher decides for all; others carry out what it says (`guest.py`).

The launcher (`launcher.py`) sees a process, whatever its host: it has it started and ended, and is told of its end. A
host that is lost takes its processes along; what is to start on it waits until a launcher takes its place: the same one
started again, or a spare one, with a number above those of the hosts that train.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from onecopy.resilience.forks import Forks
from onecopy.resilience.lines import SILENCE, Lines
from onecopy.version import __version__

_A_GREETING: Final = 5.0
"""Seconds that whoever connects gets to say who it is."""


@dataclass(eq=False)
class _Guest:
    """A launcher of another host: ``number`` is -1 until it has said which, ``host`` is -1 while it waits."""

    lines: Lines
    number: int = -1
    host: int = -1
    heard: float = field(default_factory=time.monotonic)
    running: set[str] = field(default_factory=set)


class Hosts:
    """Has processes forked on several hosts, and learns of their ends, and of those of hosts.

    Args:
        forks: of this host.
        address: host and port at which the others find this one.
        hosts: how many there are.
        ranks: of each.

    Attributes:
        address: where processes find what listens in this one.
        port: at which it listens for the other hosts.

    Raises:
        OSError: if nothing can listen at ``address``.
    """

    def __init__(self, forks: Forks, address: tuple[str, int], hosts: int, ranks: int) -> None:
        self._forks = forks
        self.address = address[0]
        self._listening = socket.create_server(address)
        self.port = self._listening.getsockname()[1]
        self._hosts, self._ranks = hosts, ranks
        self._guests: list[_Guest] = []
        now = time.monotonic()
        self._missing = dict.fromkeys(range(1, hosts), now)
        self._was_here: set[int] = set()
        self._host_of: dict[str, int] = {}
        self._due: dict[int, dict[str, dict[str, str]]] = {host: {} for host in range(1, hosts)}
        self._found: list[dict[str, Any]] = []

    def missing(self) -> dict[int, float]:
        """Seconds since which hosts are not there, by their numbers."""
        now = time.monotonic()
        return {host: now - since for host, since in self._missing.items()}

    # --- processes

    def start(self, process: str, host: int, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        """Have a process started on a host; on one that is missing, as soon as it is there.

        ``arguments`` are for this host: each has those that its own launcher was given.
        """
        self._host_of[process] = host
        if host == 0:
            self._forks.start(process, 0, environment, arguments)
        elif guest := self._guest_of(host):
            guest.running.add(process)
            guest.lines.send(start=process, environment=dict(environment))
        else:
            self._due[host][process] = dict(environment)

    def kill(self, process: str, number: int = signal.SIGKILL) -> None:
        """Send a process a signal, if it still runs; one that has not begun does not begin."""
        host = self._host_of.get(process, 0)
        if host == 0:
            self._forks.kill(process, number)
        elif guest := self._guest_of(host):
            guest.lines.send(kill=process, signal=int(number))
        elif self._due[host].pop(process, None) is not None:
            self._found.append({"process": process, "code": -int(number)})

    def answers(self, seconds: float) -> list[dict[str, Any]] | None:
        """What has happened within so many seconds; None if this host's zygote has ended.

        As `Forks.answers`, and beside these: {"lost": a host, "processes": those that it took along}, {"signal": one
        that came to another host's launcher}.
        """
        sources: list[Any] = [self._forks, self._listening, *(guest.lines for guest in self._guests)]
        ready = select.select(sources, [], [], 0.0 if self._found else seconds)[0]
        found, self._found = self._found, []
        if self._forks in ready:
            own = self._forks.answers(0.0)
            if own is None:
                return None
            found += own
        if self._listening in ready:
            connection, _ = self._listening.accept()
            self._guests.append(_Guest(Lines(connection)))
        now = time.monotonic()
        for guest in list(self._guests):
            if guest.lines in ready:
                came = guest.lines.read()
                if came is None:
                    found += self._lose(guest, guest.lines.why)
                    continue
                guest.heard = now
                for line in came:
                    found += self._heard(guest, line)
            elif now - guest.heard > (SILENCE if guest.number >= 0 else _A_GREETING):
                found += self._lose(guest, f"it has not been heard of for {now - guest.heard:.0f} s")
        return found

    def close(self, code: int = 1) -> None:
        """End all processes of all hosts, and their launchers with the job's exit code."""
        for guest in self._guests:
            guest.lines.send(end=code)
            guest.lines.close()
        self._listening.close()
        self._forks.close()

    # --- other hosts

    def _guest_of(self, host: int) -> _Guest | None:
        return next((guest for guest in self._guests if guest.host == host), None)

    def _heard(self, guest: _Guest, line: dict[str, Any]) -> list[dict[str, Any]]:
        if guest.number < 0:
            self._greet(guest, line)
            return []
        if isinstance(line.get("signal"), int):
            return [{"signal": line["signal"]}]
        process, code = str(line.get("process")), line.get("code")
        if process not in guest.running:
            return []
        if isinstance(code, int):
            guest.running.discard(process)
            return [{"process": process, "code": code}]
        return [{"process": process, "pid": line.get("pid")}]

    def _greet(self, guest: _Guest, line: dict[str, Any]) -> None:
        expected = {"hosts": self._hosts, "ranks": self._ranks, "version": __version__}
        for name, value in expected.items():
            if line.get(name) != value:
                option = {"hosts": "--nnodes", "ranks": "--ranks", "version": "version of onecopy"}[name]
                why = f"expected {option} {value}, as on the first host; found {line.get(name)}"
                guest.lines.send(refused=why)
                self._drop(guest)
                _say(f"another host's launcher was refused: {why}")
                return
        number = line.get("host")
        if not isinstance(number, int) or number < 1:
            guest.lines.send(refused=f"--node-rank {number}: the first host has 0, and the others numbers above it")
            self._drop(guest)
            return
        guest.number = number
        if number in self._missing:
            self._seat(guest, number)
        elif lost := next((host for host in self._missing if host in self._was_here), None):
            self._seat(guest, lost)
        else:
            what = "is there already" if number < self._hosts else "is a spare host"
            _say(f"host {number} {what}: this launcher waits for the loss of a host")

    def _seat(self, guest: _Guest, host: int) -> None:
        """From now on ``guest`` is that host."""
        guest.host = host
        del self._missing[host]
        if host in self._was_here:
            _say(f"host {host} is there again")
        self._was_here.add(host)
        due, self._due[host] = self._due[host], {}
        for process, environment in due.items():
            guest.running.add(process)
            guest.lines.send(start=process, environment=environment)

    def _lose(self, guest: _Guest, why: str) -> list[dict[str, Any]]:
        self._drop(guest)
        if guest.host < 0:
            return []
        _say(f"host {guest.host} is lost: {why}")
        self._missing[guest.host] = time.monotonic()
        lost = {"lost": guest.host, "processes": sorted(guest.running)}
        if waiting := next((one for one in self._guests if one.number >= 0 and one.host < 0), None):
            self._seat(waiting, guest.host)
        return [lost]

    def _drop(self, guest: _Guest) -> None:
        guest.lines.close()
        self._guests.remove(guest)


def _say(words: str) -> None:
    sys.stderr.write(f"onecopy run: {words}\n")
    sys.stderr.flush()
