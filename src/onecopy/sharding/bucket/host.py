"""HostGradients: a bucket's reduced gradients on their way to host memory, where `p.grad` rests.

The host waits in two places: when it uses a gradient that is still under way, and when it is about to write to memory
from which a copy is still made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.memory.store.copies import Copies
from onecopy.observe.meter import IN_HOST_MEMORY
from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.tensor.awaited import AwaitedTensor
from onecopy.sharding.tensor.narrow import gradient_slice
from onecopy.sharding.tensor.sliced import SlicedTensor


class HostGradients:
    """One bucket's gradients on their way to host memory, where `p.grad` is.

    The memory is the bucket's own and is used again by the next backward.

    Attributes:
        is_put: gradients are under way that `show` has not shown yet.
    """

    def __init__(self, bucket: Bucket, copies: Copies) -> None:
        self.is_put = False
        self._bucket = bucket
        self._copies = copies
        self._memory: Tensor | None = None
        self._event: torch.Event | None = None

    @torch.no_grad()
    def put(self, reduced: Tensor, present: Sequence[Sequence[SlicedTensor]]) -> None:
        """Copy ``reduced``, the mean of this rank's slice, to the host, with what there is already added to it.

        Args:
            present: for each parameter the gradients that it has.
        """
        self.is_put = True
        if self._memory is None:
            memory = self._memory = torch.empty_like(reduced, device="cpu", pin_memory=True)
            meter = self._bucket.meter
            meter.add_off_device("gradients_sliced", memory.nbytes, IN_HOST_MEMORY)
            weakref.finalize(self, meter.add_off_device, "gradients_sliced", -memory.nbytes, IN_HOST_MEMORY)
        elif self._event is not None:
            self._copies.wait(self._event)
        for found, local in zip(present, self._bucket.split(reduced), strict=True):
            for gradient in found:
                before = gradient.arriving if isinstance(gradient, AwaitedTensor) else gradient.local
                local.add_(before.to(local.device, non_blocking=True))
        self._event = self._copies.to_host(reduced, self._memory)

    def show(self, used: Sequence[bool]) -> None:
        """Let `p.grad` of the parameters that some rank used show what comes."""
        self.is_put = False
        assert self._memory is not None
        assert self._event is not None
        master = self._bucket.dtypes.master
        for entry, local, use in zip(self._bucket.entries, self._bucket.split(self._memory), used, strict=True):
            if use and local.dtype == master:
                entry.sliced.grad = AwaitedTensor(local, entry.sliced.slicing, self._event.synchronize)
            elif use:
                self._event.synchronize()
                entry.sliced.grad = gradient_slice(local, entry.sliced.slicing, master)
