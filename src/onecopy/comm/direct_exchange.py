"""DirectExchange: messages between pairs of ranks, for gloo (`transport.py` says what all transports do).

gloo's own reduce-scatter costs an all-reduce on the wire and a second buffer. Here every rank sends each peer that
peer's slice and receives its own; the sum is taken locally in rank order with an fp32 (or wider) accumulator, so the
result does not depend on timing:

    reduce-scatter, N = 3, on rank 1          all-gather, on rank 1
    whole  | s0 | s1 | s2 |                   whole  | .. | s1 | .. |
             |         └──▶ rank 2                      ▲    ├──▶ rank 0, rank 2
             └──▶ rank 0                                └────┴─── received straight into place
    slice = own s1 + staged from 0 + from 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import PeerUnreachable, Posted, Program, Work
from onecopy.comm.outgoing import Outgoing, copy_ragged, copy_slices
from onecopy.comm.transport import Exchanged, Lengths, Peers, slices_of, through
from onecopy.memory.staging import Staging


class DirectExchange:
    """Messages between pairs of ranks (gloo)."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int, lengths: Lengths = None) -> Program:
        slices = slices_of(whole, peers.size, lengths)
        received = [_receive(peers, slices[peer], peer, tag) for peer in peers.others()]
        sent = [_send(peers, mine, peer, tag) for peer in peers.others()]
        own = slices[peers.rank]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        yield [*received, *sent]

    def reduce_scatter(
        self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int, lengths: Lengths = None
    ) -> Program:
        size, others = peers.size, list(peers.others())
        if lengths is not None:
            yield from self._reduce_ragged(peers, outgoing, out, tag, lengths)
            return
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

            yield from through(loan, post, take, outgoing)

    def _reduce_ragged(
        self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int, lengths: tuple[int, ...]
    ) -> Program:
        """As `reduce_scatter`: a piece holds the same fraction of every slice, so that each has all ranks receive."""
        size, rank = peers.size, peers.rank
        with self._staging.borrow_ragged(lengths, size - 1, outgoing.dtype, out.device) as loan:

            def post(number: int) -> Exchanged:
                rows = loan.rows(number)
                copy_ragged(outgoing, rows[:size], loan, number)
                start, stop = loan.span(rank, number)
                theirs = [row[: stop - start] for row in rows[size:]]
                received = [
                    _receive(peers, row, peer, tag)
                    for peer, row in zip(peers.others(), theirs, strict=True)
                    if row.numel()
                ]
                return received, [_send(peers, rows[peer], peer, tag) for peer in peers.others() if rows[peer].numel()]

            def take(number: int) -> None:
                start, stop = loan.span(rank, number)
                if start < stop:
                    rows = loan.rows(number)
                    terms = dict(zip(peers.others(), rows[size:], strict=True))
                    terms[rank] = rows[rank]
                    _mean_in_rank_order([terms[place][: stop - start] for place in range(size)], out[start:stop])

            yield from through(loan, post, take, outgoing)

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        slices = out.chunk(peers.size)
        mine = slices[peers.rank]
        yield from self.reduce_scatter(peers, outgoing, mine, tag)
        if out.dtype == outgoing.dtype:
            yield from self.all_gather(peers, mine, out, tag + 1)
            return
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

            yield from through(loan, post, take)

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int, lengths: Lengths = None) -> Program:
        if peers.rank == 0:
            slices = slices_of(whole, peers.size, lengths)
            posted = [_send(peers, slices[peer], peer, tag) for peer in peers.others()]
            out.copy_(slices[0])
            yield posted
        else:
            yield [_receive(peers, out, 0, tag)]

    def broadcast(self, peers: Peers, values: Tensor, tag: int) -> Program:
        if peers.rank == 0:
            yield [_send(peers, values, peer, tag) for peer in peers.others()]
        else:
            yield [_receive(peers, values, 0, tag)]

    def broadcast_copies(self, size: int) -> int:
        return size - 1

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        received = values.new_empty(peers.size, values.numel())
        received[peers.rank] = values
        posted = [_receive(peers, received[peer], peer, tag) for peer in peers.others()]
        posted += [_send(peers, received[peers.rank], peer, tag) for peer in peers.others()]
        yield posted
        values.copy_(received.amax(0) if maximum else received.sum(0))


def point_to_point(
    peers: Peers, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], tag: int
) -> Program:
    """Send each tensor to a place and fill each from one; messages of two ranks are paired in their order."""
    posted = []
    for post, messages in ((_receive, received), (_send, sent)):
        numbers: Counter[int] = Counter()
        for tensor, place in messages:
            posted.append(post(peers, tensor, place, tag + numbers[place]))
            numbers[place] += 1
    if posted:
        yield posted


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
