"""Presence: what a rank owes to ranks that may still read its slices when its own program has gone on.

Slices are fetched without the owner's doing (`shelf.py`), so the owner may be far ahead of its last reader. Twice it
would take the memory away too early, and does not:

- A model that was dropped leaves its slices here until all ranks have come to a message that all wait for, and to the
  next: then every rank's program is past the drop.
- A rank whose program ends normally stays until every other rank's has ended too, for the process group's time limit
  at most. A rank that waits in vain for one that has ended gets an error at once, by mailbox or by `dismiss`. A rank
  whose program failed leaves at once.

      rank 0   … last forward, end of its program: "leaving" ──▶            ◀── "leaving"    both processes end
      rank 1   … last forward, which fetches from rank 0 …          end of its program
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Final, Protocol

import torch.distributed as dist

from onecopy.comm.patience import SECONDS, nudges, patience
from onecopy.comm.serving import Server, forget_server
from onecopy.comm.transport import Peers


class Owned(Protocol):
    """A slice that other ranks may read."""

    def close(self) -> None:
        """Let nobody read it any more."""


class Presence:
    """This rank as the ranks of one group see it.

    Args:
        peers: the group.
        server: answers those that are no neighbours; None if all are.
    """

    def __init__(self, peers: Peers, server: Server | None) -> None:
        self.ranks = peers.ranks
        self._neighbours = peers.neighbours
        self._server = server
        self._dropped: list[Owned] = []
        self._dropped_before: list[Owned] = []
        self._process = os.getpid()
        self._has_left = False

    def drop(self, owned: Owned) -> None:
        """The model that ``owned`` belongs to is gone on this rank."""
        if self._has_left:
            owned.close()
            return
        self._dropped.append(owned)
        _keeping.add(self)

    def met(self) -> None:
        """A message to all and from all begins; the last one has come, so all ranks are past what was before it."""
        for owned in self._dropped_before:
            owned.close()
        self._dropped_before, self._dropped = self._dropped, []
        if not self._dropped_before:
            _keeping.discard(self)

    def leave(self) -> None:
        """The group's ranks meet elsewhere from now on."""
        self._has_left = True
        for _ in range(2):
            self.met()

    def depart(self) -> None:
        """Tell all peers that this rank's program is at its end, and wait for theirs."""
        if self._process != os.getpid():
            return
        end = time.monotonic() + self._neighbours.limit
        for mailbox in self._neighbours.mailboxes.values():
            with suppress(RuntimeError):
                mailbox.depart(SECONDS)
        waits: list[Callable[[float], None]]
        waits = [mailbox.wait_for_departure for mailbox in self._neighbours.mailboxes.values()]
        if self._server is not None:
            waits += [self._server.depart(place) for place in self._server.distant]
        with patience(self._describe, None):
            for wait in waits:
                with suppress(RuntimeError):
                    wait(max(0.01, end - time.monotonic()))
        if self._server is not None:
            self._server.end()

    def abandon(self) -> None:
        """This rank's program ends with an error."""
        if self._process == os.getpid() and self._server is not None:
            self._server.abandon()

    def _describe(self, _: object) -> str:
        return (
            f"this rank's program is at its end, and its process stays for ranks that may still read its slices, "
            f"{self._neighbours.limit:.0f} s at most (the process group's timeout)"
        )

    def dismiss(self, rank: object) -> None:
        """This rank waits in vain for ``rank`` (None: for any): if that one is leaving, it need not stay for this."""
        if self._server is not None:
            for place in list(self._server.departing):
                if rank in (None, self.ranks[place]):
                    self._server.dismiss(place)


_presences: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, Presence]] = weakref.WeakKeyDictionary()
_keeping: Final[set[Presence]] = set()
"""Those that hold slices of dropped models."""


def presence_of(peers: Peers, server: Server | None) -> Presence:
    """This rank's presence on the group; it begins with the first call."""
    presence = _presences.get(peers.group)
    if presence is None:
        presence = _presences[peers.group] = Presence(peers, server)
        _stay_at_end()
    return presence


def leave(group: dist.ProcessGroup) -> None:
    """Nobody meets on ``group`` any more: what lies here for its ranks is closed, and nobody waits for their end."""
    if (presence := _presences.pop(group, None)) is not None:
        presence.leave()
    forget_server(group)


def met(ranks: Sequence[int]) -> None:
    """A message to and from all of ``ranks`` begins."""
    for presence in list(_keeping):
        if set(presence.ranks) <= set(ranks):
            presence.met()


def _dismiss(rank: object) -> None:
    for presence in list(_presences.values()):
        presence.dismiss(rank)


nudges.append(_dismiss)


def _depart() -> None:
    error = sys.exception()
    ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
    # The interpreter sets `last_value` when an exception ends the program.
    ends_well = ends_well and getattr(sys, "last_value", None) is None
    for presence in {*_presences.values(), *_keeping}:
        if ends_well:
            presence.depart()
        else:
            presence.abandon()


_process_that_stays = 0


def _stay_at_end() -> None:
    """Have `_depart` called when this process ends: the interpreter, or a multiprocessing.Process."""
    global _process_that_stays
    if _process_that_stays != os.getpid():
        _process_that_stays = os.getpid()
        Finalize(None, _depart, exitpriority=0)
