"""Gradients: the way of a bucket's gradients from autograd to `p.grad`.

    autograd ──arrive──▶ whole leaf's .grad ──▶ (pieces) ──reduce-scatter──▶ reduced ──install──▶ p.grad
                                  └──(not sending)──▶ kept ──┘

==============  ============  ====================================================================
``kept``        all elements  summed over micro-batches that do not send (stages 0 and 1)
``kept_slice``  one slice     summed over micro-batches that do, where masters are too narrow to sum in
``reduced``     one slice     the mean over ranks; becomes the memory of `p.grad`, or goes where that rests
==============  ============  ====================================================================

Autograd adds to what is kept itself where it computes gradients in the dtype in which they are kept (`prepare`), as it
does in one process; else they are added when the unit's backward is over. What is sent leaves through communication
buffers of constant size, in the reduce dtype; autograd's own gradients, or the kept ones, live until the last of them
is copied out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.collective import Collective
from onecopy.comm.dtensors import local_of
from onecopy.comm.outgoing import Flat, Outgoing
from onecopy.errors import UsageError
from onecopy.memory.strides import memory_order
from onecopy.sharding.bucket.arrived import ArrivedGradients
from onecopy.sharding.bucket.bucket import POISON, Bucket, Entry, Message
from onecopy.sharding.bucket.flat import FlatBuffer
from onecopy.sharding.bucket.host import HostGradients
from onecopy.sharding.bucket.masters import MastersOnHost
from onecopy.sharding.bucket.resting_gradients import RestingGradients
from onecopy.sharding.tensor.narrow import gradient_slice
from onecopy.sharding.tensor.pending import PendingGradient
from onecopy.sharding.tensor.sliced import SlicedTensor


class _Gradient:
    """The state of one parameter's gradient between autograd and `p.grad`."""

    def __init__(self, entry: Entry) -> None:
        self.sliced = entry.sliced
        self.whole = entry.whole
        self.nbytes = local_of(entry.whole).nbytes
        self._spec = entry.sliced.slicing.spec
        sliced = entry.sliced
        nothing = torch.full((1,), torch.nan if POISON else 0.0, dtype=torch.float32).to(sliced.device, sliced.dtype)
        nothing = nothing.expand(sliced.slicing.numel)
        self.pending = PendingGradient(nothing, entry.sliced.slicing)
        self.arrived = False
        # A gradient that had been reduced before later micro-batches were kept.
        self.earlier: SlicedTensor | None = None

    @property
    def local(self) -> Tensor:
        """What autograd has put into the whole leaf, as the bucket holds it."""
        arrived = self.whole.grad
        assert arrived is not None
        return arrived if self._spec is None else self._spec.local(arrived)

    def flat(self, order: list[int] | None) -> Tensor:
        """The same, 1-D, with the dimensions in ``order``."""
        return (self.local if order is None else self.local.permute(order)).reshape(-1)

    @property
    def is_pending(self) -> bool:
        return self.sliced.grad is self.pending

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is kept of it: it is new, or the user has cleared it since."""
        return not self.is_pending or self.pending.cleared

    def show_pending(self) -> None:
        if not self.is_pending:
            present: Any = self.sliced.grad
            self.earlier = present
            self.sliced.grad = self.pending

    def drop_pending(self) -> None:
        if self.is_pending:
            self.sliced.grad = self.earlier
        self.earlier = None
        self.pending.take_beside()

    def take_present(self) -> list[SlicedTensor]:
        """What a reduced gradient is to be added to; what came beside is none of `p.grad`'s from then on."""
        present: Any = self.earlier if self.is_pending else self.sliced.grad
        beside = self.pending.take_beside() if self.is_pending else None
        return [gradient for gradient in (present, beside) if gradient is not None]

    def install(self, gradient: SlicedTensor) -> bool:
        """Add to `p.grad`. Returns whether there was one already, so that ``gradient``'s own memory goes."""
        present: Any = self.sliced.grad
        if present is self.pending:
            present = self.earlier
            if (beside := self.pending.take_beside()) is not None:
                gradient.add_(beside)
        if present is not None:
            present.add_(gradient)
        self.sliced.grad = gradient if present is None else present
        self.earlier = None
        return present is not None


class Gradients:
    """The gradients of one trainable bucket.

    Attributes:
        on_arrival: called in backward when the last of the bucket's gradients has been computed.
        meanwhile: called in backward whenever a gradient has been computed.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.on_arrival: Callable[[], None] | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._bucket = bucket
        # None where elements lie in the order of dimensions, as in most.
        orders = [memory_order(strides) for strides in bucket.strides]
        self._orders = [None if order == sorted(order) else order for order in orders]
        self._gradients = [_Gradient(entry) for entry in bucket.entries]
        self._kept: FlatBuffer | None = None
        self._kept_slice: Tensor | None = None
        self._reduced: Tensor | None = None
        self._reduction: Iterator[Collective] = iter(())
        self._underway: Collective | None = None
        self._is_closed = False
        self._missing = len(self._gradients)
        self._arrived_bytes = 0
        self._sums_in_place = bucket.dtypes.compute == bucket.dtypes.accumulate and not any(bucket.specs)
        self._lends = False
        self._slice_bytes = bucket.slice_numel * bucket.dtypes.accumulate.itemsize
        self._resting = _store_of(bucket)
        # Weak, because torch's C++ side holds the hook where Python's garbage collector does not see it.
        this = weakref.ref(self)
        for position, gradient in enumerate(self._gradients):
            gradient.whole.register_post_accumulate_grad_hook(partial(_arrive, this, position))

    def _arrive(self, position: int) -> None:
        """Autograd has put a gradient into the whole leaf."""
        gradient = self._gradients[position]
        if self._is_closed:
            raise UsageError(
                f"the gradient of {gradient.sliced.slicing.name!r} came after its unit {self._bucket.unit!r} had "
                "finished backward, because the loss uses a tensor that the unit's forward did not return: return "
                "that tensor from the forward."
            )
        arrived = gradient.whole.grad
        assert arrived is not None
        if arrived.is_sparse:
            gradient.whole.grad = arrived.to_dense()
        if not gradient.arrived:
            gradient.arrived = True
            self._missing -= 1
            if not self._lends:
                self._count_arrived(gradient.nbytes)
        if self.meanwhile is not None:
            self.meanwhile()
        if self._missing == 0 and self.on_arrival is not None:
            self.on_arrival()

    def _count_arrived(self, nbytes: int) -> None:
        self._arrived_bytes += nbytes
        self._bucket.meter.add("gradients_whole", nbytes)

    @property
    def sliced_bytes(self) -> int:
        """Bytes of this rank's slices in `p.grad`, on the device."""
        found = [g.sliced.grad for g in self._gradients if not g.is_pending]
        slices = [gradient for gradient in found if isinstance(gradient, SlicedTensor)]
        return sum(g.held_bytes for g in slices if g.device.type == self._bucket.device.type)

    @property
    def numel(self) -> int:
        """Elements that are sent, padding included."""
        return self._bucket.layout.padded_numel

    @property
    def device(self) -> torch.device:
        return self._bucket.device

    @property
    def any_arrived(self) -> bool:
        """Whether this backward has computed a gradient for one of the parameters."""
        return self._missing < len(self._gradients)

    @property
    def all_arrived(self) -> bool:
        """Whether this backward has computed a gradient for each of the parameters."""
        return self._missing == 0

    def uses(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient to send; to be asked before `keep` or `start_reduce`."""
        return [g.arrived or g.is_pending for g in self._gradients]

    def prepare(self) -> None:
        """A backward begins: what has been kept is what autograd adds to, but where the user has cleared it since."""
        if self._kept is None or not self._sums_in_place or self.any_arrived:
            return
        self._lends = True
        with torch.no_grad():
            for view, gradient in zip(self._kept.views, self._gradients, strict=True):
                if gradient.is_fresh:
                    view.zero_()
                gradient.pending.cleared = False
                gradient.whole.grad = view

    def keep(self) -> None:
        """Add this micro-batch's gradients to those kept, in the accumulate dtype. Nothing is sent."""
        if not self.any_arrived:
            self._forget_arrived()
            return
        if self._kept is None:
            memory = self._bucket.empty_gradients(self._bucket.layout.padded_numel)
            self._kept = self._bucket.buffer(memory.dtype, memory)
            self._bucket.meter.add("gradients_whole", self._kept.nbytes)
        self._add_arrived(self._kept)
        for gradient in self._gradients:
            if gradient.arrived:
                gradient.show_pending()
        self._forget_arrived()

    def start_reduce(self) -> None:
        """Send this micro-batch's gradients together with those kept: (N-1)/N of the bucket over the shard axis."""
        self._is_closed = True
        self._reduction = self._reduce(self._take_outgoing())
        self._underway = next(self._reduction, None)

    def progress(self) -> None:
        """Move a reduce that is under way on as far as nothing has to be waited for."""
        while self._underway is not None and self._underway.advance_if_ready():
            if self._underway.done:
                self._underway = next(self._reduction, None)

    def finish_reduce(self) -> None:
        """Wait until this rank's slice of the mean gradient is there."""
        while self._underway is not None:
            self._underway.finish()
            self._underway = next(self._reduction, None)
        if self._resting is not None and self._reduced is not None:
            self._resting.put(self._reduced, [gradient.take_present() for gradient in self._gradients])
            self._reduced = None
            self._bucket.meter.add("gradients_sliced", -self._slice_bytes)

    def install(self, used: Sequence[bool], *, last: bool) -> None:
        """Add the reduced gradients to `p.grad` of the parameters that some rank used; others keep what they have.

        Args:
            used: for each parameter, whether any rank had a gradient for it.
            last: whether the optimizer may step now. Until then masters narrower than the accumulate dtype wait.
        """
        if self._resting is not None:
            self._resting.show(used)
            for gradient, use in zip(self._gradients, used, strict=True):
                gradient.earlier = None if use else gradient.earlier
            return
        assert self._reduced is not None
        reduced, self._reduced = self._reduced, None
        dtypes = self._bucket.dtypes
        if dtypes.sums_wider:
            if self._kept_slice is not None:
                reduced.add_(self._kept_slice)
            self._kept_slice = None if last else reduced
            reduced = reduced.to(dtypes.master)
        for gradient, use, local in zip(self._gradients, used, self._bucket.split(reduced), strict=True):
            if use and self._kept_slice is not None:
                gradient.show_pending()
            elif use and gradient.install(gradient_slice(local, gradient.sliced.slicing, dtypes.master)):
                self._bucket.meter.add("gradients_sliced", -local.nbytes)

    @property
    def reduced(self) -> bool:
        """Whether a reduced gradient waits for `install`."""
        return self._reduced is not None or (self._resting is not None and self._resting.is_put)

    def reopen(self) -> None:
        """The backward is over; the next one may bring gradients again."""
        self._is_closed = False

    def drop(self) -> None:
        """Forget what is between autograd and `p.grad`, to go on after a backward that failed."""
        self._underway, self._reduction = None, iter(())
        if self._kept is not None:
            self._bucket.meter.add("gradients_whole", -self._kept.nbytes)
        self._kept = self._kept_slice = self._reduced = None
        self._is_closed = False
        self._forget_arrived()
        if self._resting is not None:
            self._resting.is_put = False
        for gradient in self._gradients:
            gradient.drop_pending()

    def _take_outgoing(self) -> Outgoing:
        """All that is to be sent."""
        bucket = self._bucket
        kept, self._kept = self._kept, None
        if kept is not None:
            self._add_arrived(kept)
            self._forget_arrived()
            return Flat(kept.flat, bucket.dtypes.reduce, partial(bucket.meter.add, "gradients_whole", -kept.nbytes))
        flat = [g.flat(order) if g.arrived else None for g, order in zip(self._gradients, self._orders, strict=True)]
        if any(bucket.specs):
            # A DTensor that came in another placement than its parameter's has another size in that.
            bucket.meter.add("gradients_whole", sum(f.nbytes for f in flat if f is not None) - self._arrived_bytes)
        self._arrived_bytes = 0
        outgoing = ArrivedGradients(
            bucket.layout,
            flat,
            bucket.dtypes.reduce,
            bucket.device,
            lambda nbytes: bucket.meter.add("gradients_whole", -nbytes),
        )
        self._forget_arrived()
        return outgoing

    def _add_arrived(self, kept: FlatBuffer) -> None:
        """Add to ``kept``; a parameter whose gradient is new, or was cleared by the user since, starts anew."""
        copied: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for view, gradient in zip(kept.views, self._gradients, strict=True):
                if self._lends:
                    # Where autograd was asked for a graph of the gradient, it has put the sum elsewhere.
                    if gradient.arrived and gradient.whole.grad is not view:
                        copied.append((view, gradient.local))
                    continue
                if gradient.arrived:
                    (copied if gradient.is_fresh else added).append((view, gradient.local.to(view.dtype)))
                elif gradient.is_fresh:
                    view.zero_()
                gradient.pending.cleared = False
            if copied:
                torch._foreach_copy_([view for view, _ in copied], [arrived for _, arrived in copied])
            if added:
                torch._foreach_add_([view for view, _ in added], [arrived for _, arrived in added])

    def _forget_arrived(self) -> None:
        self._missing = len(self._gradients)
        self._bucket.meter.add("gradients_whole", -self._arrived_bytes)
        self._arrived_bytes = 0
        self._lends = False
        for gradient in self._gradients:
            gradient.arrived = False
            gradient.whole.grad = None

    def _reduce(self, outgoing: Outgoing) -> Iterator[Collective]:
        """Reduce-scatter over shard, then all-reduce over every replicate axis."""
        bucket, mesh = self._bucket, self._bucket.mesh
        reduced = self._reduced = bucket.empty_gradients(bucket.slice_numel)
        bucket.meter.add("gradients_sliced", reduced.nbytes)
        if mesh.shard.size > 1 or mesh.copies == 1:
            tag, ragged = bucket.tag + Message.REDUCE, bucket.layout.ragged
            if collective := mesh.shard.reduce_scatter(outgoing, reduced, bucket.unit, tag, ragged):
                yield collective
            if mesh.copies == 1:
                return
            outgoing = Flat(reduced, bucket.dtypes.reduce)
        for position, axis in enumerate(mesh.replicate):
            tag = bucket.tag + Message.COMBINE + 2 * position
            if collective := axis.all_reduce(outgoing, reduced, bucket.unit, tag):
                yield collective
                outgoing = Flat(reduced, bucket.dtypes.reduce)


def _store_of(bucket: Bucket) -> RestingGradients | HostGradients | None:
    """Where reduced gradients go; None: they stay on the device."""
    if bucket.masters.pages is not None:
        return RestingGradients(bucket)
    return HostGradients(bucket, bucket.masters.copies) if isinstance(bucket.masters, MastersOnHost) else None


def _arrive(gradients: weakref.ref[Gradients], position: int, whole: Tensor) -> None:
    if (alive := gradients()) is not None:
        alive._arrive(position)
