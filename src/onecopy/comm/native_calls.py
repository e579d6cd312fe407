"""NativeCalls: the backend's own primitives, for NCCL and any backend not known here (see `transport.py`).

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py: the methods of `ProcessGroup`
behind `dist.all_gather_single`, `dist.reduce_scatter_single` and `dist.all_reduce`, public by name and not documented.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.collective import Posted, Program
from onecopy.comm.outgoing import Outgoing, copy_ragged, copy_slices
from onecopy.comm.transport import Exchanged, Lengths, Peers, through
from onecopy.memory.staging import Staging
from onecopy.observe.stalls import Stall

_CPU: Final = torch.device("cpu")


class DeviceWork:
    """A backend's work on a device with streams.

    Attributes:
        stall: the wait of the stream that computes, from `wait` on.
    """

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work = work
        self.stall = Stall(device)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Let the stream that computes wait. The host does not."""
        with self.stall:
            self._work.wait()


class NativeCalls:
    """The backend's own collectives, on its own streams; waiting orders the caller's stream after them.

    Those of every unit go to the process group itself: torch.distributed's functions of the same names would only
    check again, at each call, what holds for every one of them.

    Args:
        staging: buffers through which gradients pass.
        averages: NCCL averages by itself, which keeps fp16 sums in range; others sum and leave the division to us.
        device: where tensors are.
    """

    def __init__(self, staging: Staging, *, averages: bool, device: torch.device = _CPU) -> None:
        self._staging = staging
        accelerator = torch.accelerator.current_accelerator()
        self._device = device if accelerator is not None and accelerator.type == device.type else None
        self._averages = averages
        operation = dist.ReduceOp(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        self._reduce_scatter = dist.ReduceScatterOptions()
        self._reduce_scatter.reduceOp = operation
        self._all_reduce = dist.AllreduceOptions()
        self._all_reduce.reduceOp = operation

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int, lengths: Lengths = None) -> Program:
        if lengths is None:
            yield self._posted(peers.group.all_gather_single(whole, mine))
        else:
            # One group of broadcasts, from each rank its slice: as many bytes over each link as an all-gather of equal
            # slices. Padding to the longest would send N times the longest; all-to-all has one link carry N - 1 copies.
            yield self._posted(peers.group.allgather([list(whole.split(lengths))], [mine]))

    def reduce_scatter(
        self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int, lengths: Lengths = None
    ) -> Program:
        if lengths is not None:
            yield from self._reduce_ragged(peers, outgoing, out, lengths)
            return
        # Sums are taken where they stay, or in a row of their own where they are of another dtype.
        casts = out.dtype != outgoing.dtype
        with self._staging.borrow(peers.size + casts, out.numel(), outgoing.dtype, out.device, keeps=False) as loan:

            def post(number: int) -> Exchanged:
                own, (start, stop) = loan.piece(number), loan.pieces[number]
                total = out[start:stop]
                if casts:
                    own, total = own[:-1], own[-1]
                copy_slices(outgoing, own, start)
                return self._posted(peers.group.reduce_scatter_single(total, own.view(-1), self._reduce_scatter)), []

            def take(number: int) -> None:
                if casts:
                    out[slice(*loan.pieces[number])].copy_(loan.piece(number)[-1])

            yield from through(loan, post, take, outgoing)
        if not self._averages:
            out.div_(peers.size)

    def _reduce_ragged(self, peers: Peers, outgoing: Outgoing, out: Tensor, lengths: tuple[int, ...]) -> Program:
        """As `reduce_scatter`: one group of reduces for each piece, to each rank its part of the piece."""
        size, rank = peers.size, peers.rank
        casts = out.dtype != outgoing.dtype
        with self._staging.borrow_ragged(lengths, int(casts), outgoing.dtype, out.device, keeps=False) as loan:

            def post(number: int) -> Exchanged:
                rows, (start, stop) = loan.rows(number), loan.span(rank, number)
                copy_ragged(outgoing, rows[:size], loan, number)
                total = rows[size][: stop - start] if casts else out[start:stop]
                return self._posted(peers.group.reduce_scatter([total], [rows[:size]], self._reduce_scatter)), []

            def take(number: int) -> None:
                start, stop = loan.span(rank, number)
                if casts:
                    out[start:stop].copy_(loan.rows(number)[size][: stop - start])

            yield from through(loan, post, take, outgoing)
        if not self._averages:
            out.div_(size)

    def all_reduce(self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int) -> Program:
        with self._staging.borrow(1, out.numel(), outgoing.dtype, out.device, keeps=False) as loan:

            def post(number: int) -> Exchanged:
                (piece,) = loan.piece(number)
                outgoing.copy_to(piece, loan.pieces[number][0])
                return self._posted(peers.group.allreduce([piece], self._all_reduce)), []

            def take(number: int) -> None:
                out[slice(*loan.pieces[number])].copy_(loan.piece(number)[0])

            yield from through(loan, post, take, outgoing)
        if not self._averages:
            out.div_(peers.size)

    def scatter(self, peers: Peers, whole: Tensor, out: Tensor, tag: int, lengths: Lengths = None) -> Program:
        if lengths is not None:
            # Backends scatter equal parts alone; this is no part of a step.
            yield self._posted(dist.broadcast(whole, src=peers.ranks[0], group=peers.group, async_op=True))
            out.copy_(whole.split(lengths)[peers.rank])
            return
        slices = list(whole.chunk(peers.size)) if peers.rank == 0 else None
        yield self._posted(dist.scatter(out, slices, src=peers.ranks[0], group=peers.group, async_op=True))

    def broadcast(self, peers: Peers, values: Tensor, tag: int) -> Program:
        yield self._posted(dist.broadcast(values, src=peers.ranks[0], group=peers.group, async_op=True))

    def broadcast_copies(self, size: int) -> int:
        return 1

    def combine(self, peers: Peers, values: Tensor, maximum: bool, tag: int) -> Program:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        yield self._posted(dist.all_reduce(values, op=operation, group=peers.group, async_op=True))

    def _posted(self, work: dist.Work | None) -> list[Posted]:
        if work is None:
            return []
        return [Posted(work if self._device is None else DeviceWork(work, self._device), None)]
