"""Lines: JSON between the launchers of a job's hosts, one object a line over a socket. It imports no torch.

The first host's launcher listens (`hosts.py`); those of the other hosts connect (`guest.py`) and say how many ranks
they are to start, of how many hosts. From then on they are the far end of the first one's orders, as the zygote is on
its own host:

    first host ──{"start", "environment"}, {"kill", "signal"}, {"end": the job's exit code}──▶ another host
               ◀──{"process", "pid"}, {"process", "code"}, {"signal"}; {} once a second──
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any, Final

SILENCE: Final = 10.0
"""Seconds after which a host that is not heard of is lost."""

BEAT: Final = 1.0
"""Seconds between two signs of life."""

_LONGEST: Final = 1 << 16
"""Bytes of a line."""

_SHORT_OF_ROOM: Final = 5.0
"""Seconds that a peer gets to read what is sent to it."""


class Lines:
    """One end of a connection.

    Attributes:
        why: what ended it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""
        self.why = "the connection was closed"
        connection.settimeout(_SHORT_OF_ROOM)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A host without power closes nothing.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENCE))

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **what: object) -> None:
        """Send one object. Whether it arrives shows in `read`."""
        with suppress(OSError):
            self._connection.sendall((json.dumps(what) + "\n").encode())

    def read(self) -> list[dict[str, Any]] | None:
        """The objects that have come, once the socket is readable; None if the connection is at its end."""
        try:
            came = self._connection.recv(_LONGEST)
        except OSError as error:
            self.why = error.strerror or str(error)
            return None
        if not came:
            return None
        *lines, self._pending = (self._pending + came).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            found = [None]
        if len(self._pending) > _LONGEST or not all(isinstance(one, dict) for one in found):
            self.why = "something else than a launcher of onecopy spoke there"
            return None
        return found

    def close(self) -> None:
        self._connection.close()


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Raises:
        ValueError: if it is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--rdzv-endpoint is host:port, such as node-0:29400; found {endpoint!r}")
    return host, int(port)
