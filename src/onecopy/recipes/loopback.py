"""Loopback: how the ranks of one host meet, over a store that listens on 127.0.0.1 and on no other address.

torchrun's own `--standalone` listens on every address of the host, and its store asks nobody for a name: whoever
connects can list, delete and plant keys. It serves several hosts as well; one needs none of that.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND: Final = "onecopy-loopback"
"""Its name, for torchrun's ``--rdzv-backend``."""

_ADDRESS: Final = "127.0.0.1"
_PATIENCE: Final = timedelta(seconds=60)


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one agent with itself, whose store its ranks use too."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        # Its own socket, for the store can only be told a port.
        listening = socket.create_server((_ADDRESS, 0))
        self._store: Any = TCPStore(
            _ADDRESS,
            listening.getsockname()[1],
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def register() -> None:
    """Make it known to torchrun."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LoopbackRendezvous(parameters.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
