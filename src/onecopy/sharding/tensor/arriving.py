"""ArrivingBox: memory for a box of a tensor that rests in a file, while torch.distributed.checkpoint loads it.

A loader asks a tensor for the memory of each box and copies into it, or into views of it. What is copied goes on to
where the tensor rests, so that a load needs memory for one box at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ArrivingBox(torch.Tensor):
    """See the file's first lines.

    Attributes:
        memory: the box, or a view of it; a plain tensor.
        on_write: called when it was written to.
    """

    memory: Tensor
    on_write: Callable[[], None]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: Tensor, on_write: Callable[[], None]) -> ArrivingBox:
        box: ArrivingBox = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=memory.device
        )
        box.memory = memory
        box.on_write = on_write
        return box

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        box = next(a for a in args if isinstance(a, ArrivingBox))
        result = func(*[a.memory if isinstance(a, ArrivingBox) else a for a in args], **(kwargs or {}))
        if func._schema.is_mutable:
            if isinstance(args[0], ArrivingBox):
                args[0].on_write()
            return args[0]
        if isinstance(result, Tensor) and result.untyped_storage()._cdata == box.memory.untyped_storage()._cdata:
            return ArrivingBox(result, box.on_write)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ArrivingBox({self.memory})"
