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
        nbytes: bytes of it when allocated.
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
        self._allocated = True

    def allocate(self) -> bool:
        """Get memory again after `free`; its content is undefined. Returns whether there was none."""
        if self._allocated:
            return False
        self.flat.untyped_storage().resize_(self.nbytes)
        self._allocated = True
        return True

    def free(self) -> bool:
        """Give the memory back, whoever looks at it. Returns whether there was any."""
        if not self._allocated:
            return False
        self.flat.untyped_storage().resize_(0)
        self._allocated = False
        return True
