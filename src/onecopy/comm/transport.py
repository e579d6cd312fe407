"""Transport: what turns collectives into messages. Each declares what it sends; tests hold that against the kernel.

There are two: messages between pairs of ranks (`direct_exchange.py`, for gloo) and the backend's own primitives
(`native_calls.py`); `backends.py` chooses. Gradients pass through a staging buffer of constant size in both, with the
cast on the way: a larger unit goes through it in pieces (`through`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import Posted, Program
from onecopy.comm.cross_memory import Neighbours
from onecopy.comm.outgoing import Outgoing
from onecopy.memory.staging import Loan, RaggedLoan

Exchanged = tuple[list[Posted], list[Posted]]
"""The messages of one piece: those to come, and those that must be gone before its memory is used again."""


Lengths = tuple[int, ...] | None
"""Elements of each slice, by place; None: all are equal."""


@dataclass(frozen=True)
class Peers:
    """One axis of the mesh as a transport sees it.

    Attributes:
        group: its process group.
        rank: this rank's place on it.
        ranks: the global rank at each place.
        neighbours: the places that are reached through memory and not through a socket.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    neighbours: Neighbours = field(default_factory=Neighbours)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def others(self) -> Iterator[int]:
        """The other places on the axis, nearest first, so that no rank is everybody's first target."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size


class Transport(Protocol):
    """The collectives the engine needs. ``whole`` is flat, of `size` slices; ``tag`` names the collective.

    Slices are equal, or of ``lengths`` elements, by place. Ranks then send (N-1)/N of the whole on average.
    """

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int, lengths: Lengths = None) -> Program:
        """Fill ``whole`` with every rank's ``mine``, this rank's too. Sends (N-1)/N of ``whole``."""

    def reduce_scatter(
        self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int, lengths: Lengths = None
    ) -> Program:
        """Set ``out`` to the mean over ranks of this rank's slice of ``outgoing``. Sends (N-1)/N of it."""

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        """Set ``out`` to the mean over ranks of ``outgoing``, which may be it. Sends 2(N-1)/N of it."""

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int, lengths: Lengths = None) -> Program:
        """Set ``out`` to this rank's slice of the first rank's ``whole``, which sends (N-1)/N of it.

        ``whole`` may be the first rank's afterwards.
        """

    def broadcast(self, peers: Peers, values: Tensor, tag: int) -> Program:
        """Replace ``values`` by the first rank's, which sends them to each other rank, or has the backend do so."""

    def broadcast_copies(self, size: int) -> int:
        """How often the first of ``size`` ranks sends what it broadcasts."""

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        """Replace the few ``values`` by their sum (or maximum) over ranks."""


def slices_of(whole: Tensor, size: int, lengths: Lengths) -> Sequence[Tensor]:
    """The slices of the flat ``whole``, by place."""
    return whole.chunk(size) if lengths is None else whole.split(lengths)


def through(
    loan: Loan | RaggedLoan,
    post: Callable[[int], Exchanged],
    take: Callable[[int], None],
    outgoing: Outgoing | None = None,
) -> Program:
    """Send all pieces through the loan: a bank is filled again when its piece has come, been taken in, and gone.

    Args:
        loan: the buffer.
        post: fills the numbered piece and posts its messages.
        take: uses what has come for the numbered piece.
        outgoing: closed once the last piece has been filled.
    """
    count, banks = len(loan.pieces), len(loan.banks)
    if count == 1:
        # Most units, and worth little machinery.
        received, sent = post(0)
        if outgoing is not None:
            outgoing.close()
        yield received
        take(0)
        if sent:
            yield sent
        return
    exchanged: list[Exchanged] = []

    def fill(number: int) -> None:
        exchanged.append(post(number))
        if number == count - 1 and outgoing is not None:
            outgoing.close()

    for number in range(min(banks, count)):
        fill(number)
    for number in range(count):
        received, sent = exchanged[number]
        yield received
        take(number)
        if number + banks < count:
            if sent:
                yield sent
            fill(number + banks)
    if left := [message for _, sent in exchanged[-banks:] for message in sent]:
        yield left
