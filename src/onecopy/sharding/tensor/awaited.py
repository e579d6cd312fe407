"""AwaitedTensor: a SlicedTensor whose elements are still on their way to host memory; whoever uses them waits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


class AwaitedTensor(SlicedTensor):
    """See the file's first line.

    Attributes:
        arriving: the memory into which the elements come, for who orders what reads it after the copy.
    """

    arriving: Tensor
    _wait: Callable[[], None] | None

    @staticmethod
    def __new__(cls, arriving: Tensor, slicing: Slicing, wait: Callable[[], None]) -> AwaitedTensor:
        tensor: AwaitedTensor = torch.Tensor._make_wrapper_subclass(
            cls, slicing.shape, strides=slicing.strides, dtype=arriving.dtype, device=arriving.device
        )
        tensor.arriving = arriving
        tensor.slicing = slicing
        tensor._on_write = None
        tensor._wait = wait
        return tensor

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's elements, which are there when this returns."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
        return self.arriving

    @property
    def held_bytes(self) -> int:
        return self.arriving.nbytes
