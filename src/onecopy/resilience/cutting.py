"""Cutting: ends what a rank waits for, from a thread of its own, because a rank is lost and all are to meet anew.

==================  ==================================================================================
a wait for          is ended by
==================  ==================================================================================
memory              a flag that every look at another rank's memory checks (`comm/mailbox.py`)
a socket (gloo)     `shutdown(2)` on a duplicate of the socket; gloo's own abort ends no wait on the CPU
a device (NCCL)     `abort()` of the group's backend on that device
==================  ==================================================================================

Gloo gives its sockets to nobody, so they are those that the process has more after a rendezvous than before. One that
listens is left alone: gloo ends the process when its listener fails.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py: `ProcessGroup._get_backend`,
`ProcessGroup._device_types`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist

from onecopy.comm import mailbox


def sockets() -> dict[str, int]:
    """This process's sockets, as the kernel names them, each with its descriptor. Linux alone tells them."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name.startswith("socket:"):
                    found[name] = int(descriptor)
    return found


class Cutter:
    """Ends the waits of one generation's groups. `cut` may come from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[str] | None = None
        self._connections: list[socket.socket] = []
        self._groups: list[dist.ProcessGroup] = []

    def meeting_begins(self) -> None:
        """What connects from now on belongs to the meeting."""
        with self._lock:
            self._before = set(sockets())
        mailbox.cut.clear()

    def meeting_ends(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """What has connected since then carries ``groups``."""
        with self._lock:
            self._connections = _connected_since(self._before or set())
            self._before = None
            self._groups = list(groups)

    def cut(self) -> None:
        """End every wait, in the meeting too."""
        mailbox.cut.set()
        with self._lock:
            connections = list(self._connections)
            if self._before is not None:
                connections += _connected_since(self._before)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            groups = list(self._groups)
        for group in groups:
            for device in group._device_types:
                if device.type != "cpu":
                    # It may wait for the device: a thread of its own, for the others' sake.
                    threading.Thread(target=_abort, args=(group, device), daemon=True).start()

    def leave(self) -> None:
        """Close what is left of the connections; the groups are not used any more."""
        self.cut()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections, self._groups, self._before = [], [], None


def _connected_since(before: set[str]) -> list[socket.socket]:
    found = []
    for name, descriptor in sockets().items():
        if name in before:
            continue
        with suppress(OSError):
            own = socket.socket(fileno=os.dup(descriptor))
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.close()
            else:
                found.append(own)
    return found


def _abort(group: dist.ProcessGroup, device: object) -> None:
    with suppress(RuntimeError):
        group._get_backend(device).abort()  # type: ignore[arg-type]
