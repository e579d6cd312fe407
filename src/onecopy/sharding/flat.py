"""FlatBuffer: one flat tensor seen through views with the parameters' shapes, whose memory comes and goes.

The tensors are made once; only their storage is resized. So what autograd saved of a view in forward is filled again
in place before backward, without copies. While a buffer is freed its views must not be touched: that is a segmentation
fault, not an error. Only `bucket.py` holds them, and modules see them only while the buffer is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.sharding.layout import Layout


class FlatBuffer:
    """Memory for the whole of a bucket.

    Args:
        layout: where parameters lie.
        shapes: their shapes.
        strides: their strides, each of a dense tensor.
        memory: a flat tensor of `layout.padded_numel` elements.

    Attributes:
        flat: ``memory``.
        views: one view per parameter, of its shape and strides. They share a version counter of their own, which
            filling ``flat`` does not move: autograd would otherwise refuse the views that it saved.
    """

    def __init__(
        self, layout: Layout, shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]], memory: Tensor
    ) -> None:
        self.flat = memory
        window = memory.data
        self.views = [
            window.as_strided(shape, stride, offset)
            for shape, stride, offset in zip(shapes, strides, layout.offsets, strict=True)
        ]
        self._nbytes = memory.nbytes
        self._allocated = True

    def allocate(self) -> None:
        """Get memory again after `free`; its content is undefined."""
        if not self._allocated:
            self.flat.untyped_storage().resize_(self._nbytes)
            self._allocated = True

    def free(self) -> None:
        """Give the memory back, whoever looks at it."""
        if self._allocated:
            self.flat.untyped_storage().resize_(0)
            self._allocated = False
