"""RestingGradients: a bucket's reduced gradients on their way to the page where `p.grad` rests.

They go there as soon as they are reduced, and not only once all ranks have agreed on which parameters were used: what
waits for the agreement takes no memory. Of a parameter that no rank used the reduce brings zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.memory.store.pages import Page
from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.tensor.resting import RestingTensor
from onecopy.sharding.tensor.sliced import SlicedTensor


class RestingGradients:
    """The gradients of one bucket whose masters rest in a file.

    Attributes:
        is_put: gradients are in the page that `show` has not shown yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        pages = bucket.masters.pages
        assert pages is not None
        assert pages.gradient is not None
        self.is_put = False
        self._bucket = bucket
        self._page: Page = pages.gradient
        self._shown = [
            RestingTensor(self._page, segment.slice_start, entry.sliced.slicing, dtype=bucket.dtypes.master)
            for segment, entry in zip(bucket.segments, bucket.entries, strict=True)
        ]

    @torch.no_grad()
    def put(self, reduced: Tensor, present: Sequence[Sequence[SlicedTensor]]) -> None:
        """Write ``reduced``, the mean of this rank's slice, to the page, with what there is already added to it.

        Args:
            present: for each parameter the gradients that it has, here or elsewhere.
        """
        self.is_put = True
        earlier: Sequence[Tensor] = ()
        if any(self._is_here(gradient) for found in present for gradient in found):
            earlier = self._bucket.split(self._page.read(0, self._page.numel))
        for index, (found, local) in enumerate(zip(present, self._bucket.split(reduced), strict=True)):
            for gradient in found:
                before = earlier[index] if self._is_here(gradient) else gradient.local
                local.add_(before.to(local.device))
        self._bucket.store(self._page, reduced)

    def _is_here(self, gradient: SlicedTensor) -> bool:
        return isinstance(gradient, RestingTensor) and gradient.page is self._page

    def show(self, used: Sequence[bool]) -> None:
        """Let `p.grad` of the parameters that some rank used show what is in the page."""
        self.is_put = False
        for entry, shown, use in zip(self._bucket.entries, self._shown, used, strict=True):
            if use:
                entry.sliced.grad = shown
