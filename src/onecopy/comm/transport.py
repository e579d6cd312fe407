"""Transports: how a collective becomes messages. Each declares what it sends; tests hold that against the kernel.

`DirectExchange` is for gloo, whose own reduce-scatter costs an all-reduce on the wire and a second buffer. Every rank
sends each peer that peer's slice and receives its own; the sum is taken locally in rank order with an fp32 (or wider)
accumulator, so the result does not depend on timing:

    reduce-scatter, N = 3, on rank 1          all-gather, on rank 1
    whole  | s0 | s1 | s2 |                   whole  | .. | s1 | .. |
             |         └──▶ rank 2                      ▲    ├──▶ rank 0, rank 2
             └──▶ rank 0                                └────┴─── received straight into place
    slice = own s1 + staged from 0 + from 2

Gradients pass through a staging buffer of constant size, on both sides, with the cast on the way: a larger unit goes
through it in pieces (`_through`).

`NativeCalls` hands the work to the backend's own primitives (NCCL, and any backend not known here).

Private torch names, read in torch 2.13 and tested in tests/test_private_apis.py: `ProcessGroup._get_backend`,
`Backend.Options._timeout`, and the methods of `ProcessGroup` behind `dist.all_gather_single`,
`dist.reduce_scatter_single` and `dist.all_reduce`, which are public by name and not documented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import PeerUnreachable, Posted, Program, Work
from onecopy.comm.cross_memory import Neighbours, find_neighbours
from onecopy.comm.outgoing import Outgoing, copy_slices
from onecopy.memory.staging import Loan, Staging

Exchanged = tuple[list[Posted], list[Posted]]
"""The messages of one piece: those to come, and those that must be gone before its memory is used again."""


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
    """The collectives the engine needs. ``whole`` is flat, of `size` equal slices; ``tag`` names the collective."""

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int) -> Program:
        """Fill ``whole`` with every rank's ``mine``, this rank's too. Sends (N-1)/N of ``whole``.

        ``mine`` may be read by peers until the collective is settled.
        """

    def reduce_scatter(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        """Set ``out`` to the mean over ranks of this rank's slice of ``outgoing``. Sends (N-1)/N of it."""

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        """Set ``out`` to the mean over ranks of ``outgoing``, which may be it. Sends 2(N-1)/N of it."""

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int) -> Program:
        """Set ``out`` to this rank's slice of the first rank's ``whole``, which sends (N-1)/N of it."""

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        """Replace the few ``values`` by their sum (or maximum) over ranks."""


class DirectExchange:
    """Messages between pairs of ranks (gloo)."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int) -> Program:
        slices = whole.chunk(peers.size)
        received = [_receive(peers, slices[peer], peer, tag) for peer in peers.others()]
        sent = [_send(peers, mine, peer, tag) for peer in peers.others()]
        own = slices[peers.rank]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        yield received
        return sent

    def reduce_scatter(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        size, others = peers.size, list(peers.others())
        with self._staging.borrow(2 * size - 1, out.numel(), outgoing.dtype, out.device) as loan:

            def post(number: int) -> Exchanged:
                own, theirs = loan.piece(number).split([size, size - 1])
                copy_slices(outgoing, own, loan.pieces[number][0])
                received = [_receive(peers, row, peer, tag) for peer, row in zip(others, theirs, strict=True)]
                return received, [_send(peers, own[peer], peer, tag) for peer in others]

            def take(number: int) -> None:
                own, theirs = loan.piece(number).split([size, size - 1])
                terms = dict(zip(others, theirs, strict=True))
                terms[peers.rank] = own[peers.rank]
                _mean_in_rank_order([terms[rank] for rank in range(size)], out[slice(*loan.pieces[number])])

            yield from _through(loan, post, take, outgoing)
        return []

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        slices = out.chunk(peers.size)
        mine = slices[peers.rank]
        yield from self.reduce_scatter(peers, outgoing, mine, tag)
        if out.dtype == outgoing.dtype:
            yield (yield from self.all_gather(peers, mine, out, tag + 1))
            return []
        with self._staging.borrow(peers.size, mine.numel(), outgoing.dtype, out.device) as loan:

            def post(number: int) -> Exchanged:
                rows = loan.piece(number)
                rows[peers.rank].copy_(mine[slice(*loan.pieces[number])])
                received = [_receive(peers, rows[peer], peer, tag + 1) for peer in peers.others()]
                return received, [_send(peers, rows[peers.rank], peer, tag + 1) for peer in peers.others()]

            def take(number: int) -> None:
                # This rank's too, which others have as it was sent.
                for row, part in zip(loan.piece(number), slices, strict=True):
                    part[slice(*loan.pieces[number])].copy_(row)

            yield from _through(loan, post, take)
        return []

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int) -> Program:
        if peers.rank == 0:
            slices = whole.chunk(peers.size)
            posted = [_send(peers, slices[peer], peer, tag) for peer in peers.others()]
            out.copy_(slices[0])
            yield posted
        else:
            yield [_receive(peers, out, 0, tag)]
        return []

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        received = values.new_empty(peers.size, values.numel())
        received[peers.rank] = values
        posted = [_receive(peers, received[peer], peer, tag) for peer in peers.others()]
        posted += [_send(peers, received[peers.rank], peer, tag) for peer in peers.others()]
        yield posted
        values.copy_(received.amax(0) if maximum else received.sum(0))
        return []


class NativeCalls:
    """The backend's own collectives, on its own streams; waiting orders the caller's stream after them.

    Those of every unit go to the process group itself: torch.distributed's functions of the same names would only
    check again, at each call, what holds for every one of them.

    Args:
        staging: buffers through which gradients pass.
        averages: NCCL averages by itself, which keeps fp16 sums in range; others sum and leave the division to us.
    """

    def __init__(self, staging: Staging, *, averages: bool) -> None:
        self._staging = staging
        self._averages = averages
        operation = dist.ReduceOp(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        self._reduce_scatter = dist.ReduceScatterOptions()
        self._reduce_scatter.reduceOp = operation
        self._all_reduce = dist.AllreduceOptions()
        self._all_reduce.reduceOp = operation

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int) -> Program:
        yield _native(peers.group.all_gather_single(whole, mine))
        return []

    def reduce_scatter(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        # Sums are taken where they stay, or in a row of their own where they are of another dtype.
        casts = out.dtype != outgoing.dtype
        with self._staging.borrow(peers.size + casts, out.numel(), outgoing.dtype, out.device) as loan:

            def post(number: int) -> Exchanged:
                own, (start, stop) = loan.piece(number), loan.pieces[number]
                total = out[start:stop]
                if casts:
                    own, total = own[:-1], own[-1]
                copy_slices(outgoing, own, start)
                return _native(peers.group.reduce_scatter_single(total, own.view(-1), self._reduce_scatter)), []

            def take(number: int) -> None:
                if casts:
                    out[slice(*loan.pieces[number])].copy_(loan.piece(number)[-1])

            yield from _through(loan, post, take, outgoing)
        if not self._averages:
            out.div_(peers.size)
        return []

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        with self._staging.borrow(1, out.numel(), outgoing.dtype, out.device) as loan:

            def post(number: int) -> Exchanged:
                (piece,) = loan.piece(number)
                outgoing.copy_to(piece, loan.pieces[number][0])
                return _native(peers.group.allreduce([piece], self._all_reduce)), []

            def take(number: int) -> None:
                out[slice(*loan.pieces[number])].copy_(loan.piece(number)[0])

            yield from _through(loan, post, take, outgoing)
        if not self._averages:
            out.div_(peers.size)
        return []

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int) -> Program:
        slices = list(whole.chunk(peers.size)) if peers.rank == 0 else None
        yield _native(dist.scatter(out, slices, src=peers.ranks[0], group=peers.group, async_op=True))
        return []

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        yield _native(dist.all_reduce(values, op=operation, group=peers.group, async_op=True))
        return []


def transport_for(group: dist.ProcessGroup, device: torch.device, staging: Staging) -> Transport:
    """The transport for tensors of ``device`` on ``group``, by the name of the backend that serves them there."""
    backend = _backend(group, device)
    return DirectExchange(staging) if backend == "gloo" else NativeCalls(staging, averages=backend == "nccl")


_neighbours: Final[WeakKeyDictionary[dist.ProcessGroup, Neighbours]] = WeakKeyDictionary()


def meet(peers: Peers, exchange: Callable[[object], list[object]]) -> Peers:
    """``peers`` with those that CPU tensors reach through memory. A collective call.

    Args:
        exchange: every rank's object, in order of places.
    """
    if "cpu:gloo" not in dist.get_backend_config(peers.group):
        return peers
    neighbours = _neighbours.get(peers.group)
    if neighbours is None:
        limit = peers.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        neighbours = _neighbours[peers.group] = find_neighbours(peers.rank, exchange, limit)
    return replace(peers, neighbours=neighbours)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    name: str = group._get_backend(device).name()
    return name


def control_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors ``group`` can send."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _through(
    loan: Loan, post: Callable[[int], Exchanged], take: Callable[[int], None], outgoing: Outgoing | None = None
) -> Program:
    """Send all pieces through the loan: a bank is filled again when its piece has come, been taken in, and gone.

    Args:
        loan: the buffer.
        post: fills the numbered piece and posts its messages.
        take: uses what has come for the numbered piece.
        outgoing: closed once the last piece has been filled.
    """
    count, banks = len(loan.pieces), len(loan.banks)
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
    return []


def _mean_in_rank_order(terms: list[Tensor], out: Tensor) -> None:
    """out = (terms[0] + terms[1] + …) / N, accumulated in fp32 or wider whatever ``out`` stores."""
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    if terms[0].dtype == wide:
        torch.add(terms[0], terms[1], out=total)
    else:
        total.copy_(terms[0]).add_(terms[1])
    for term in terms[2:]:
        total.add_(term)
    total.mul_(1.0 / len(terms))
    if total is not out:
        out.copy_(total)


def _send(peers: Peers, tensor: Tensor, peer: int, tag: int) -> Posted:
    if peers.neighbours.reach(peer, tensor):
        return _post(peers, peer, lambda: peers.neighbours.offer(tensor, peer, tag))
    return _post(peers, peer, partial(dist.isend, tensor, group=peers.group, group_dst=peer, tag=tag))


def _receive(peers: Peers, tensor: Tensor, peer: int, tag: int) -> Posted:
    if peers.neighbours.reach(peer, tensor):
        return _post(peers, peer, lambda: peers.neighbours.fetch(tensor, peer, tag))
    return _post(peers, peer, partial(dist.irecv, tensor, group=peers.group, group_src=peer, tag=tag))


def _post(peers: Peers, peer: int, message: Callable[[], Work | None]) -> Posted:
    try:
        work = message()
    except RuntimeError as error:
        raise PeerUnreachable(peers.ranks[peer]) from error
    assert work is not None
    return Posted(work, peers.ranks[peer])


def _native(work: dist.Work | None) -> list[Posted]:
    return [] if work is None else [Posted(work, None)]
