"""FlatBuffer: one flat tensor seen through views with the parameters' shapes, whose memory comes and goes.

The tensors are made once; only their storage is resized. While a buffer is freed its views must not be touched: that
is a segmentation fault, not an error. So `bucket.py` frees it only when nobody else holds a view, modules see the views
only while the buffer is allocated, and autograd is given handles (`saved.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.sharding.bucket.layout import Layout


class FlatBuffer:
    """Memory for the whole of a bucket.

    Args:
        layout: where parameters lie.
        shapes: their shapes.
        strides: their strides, each of a dense tensor.
        memory: a flat tensor of `layout.padded_numel` elements.

    Attributes:
        flat: ``memory``.
        nbytes: bytes of it when allocated.
        is_allocated: whether there is memory.
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
        self.nbytes = memory.nbytes
        self.is_allocated = True

    def allocate(self) -> bool:
        """Get memory again after `free`; its content is undefined. Returns whether there was none."""
        if self.is_allocated:
            return False
        self.flat.untyped_storage().resize_(self.nbytes)
        self.is_allocated = True
        return True

    def free(self) -> bool:
        """Give the memory back, whoever looks at it. Returns whether there was any."""
        if not self.is_allocated:
            return False
        self.flat.untyped_storage().resize_(0)
        self.is_allocated = False
        return True
