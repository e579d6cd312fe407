"""PendingGradient: what `p.grad` shows while gradients are kept on the rank and have not been reduced.

It has no values. `zero_grad` works on it in both ways; any other use raises, so that nobody clips or steps with a part
of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onecopy.errors import UsageError
from onecopy.sharding.graph.boundary import in_backward
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing

aten = torch.ops.aten


class PendingGradient(SlicedTensor):
    """Stands for a gradient that is still to be reduced.

    Attributes:
        cleared: `zero_grad(set_to_none=False)` has set the kept gradient to zero.
        beside: gradients that came as slices meanwhile; None if none did.
    """

    cleared: bool
    beside: SlicedTensor | None

    def take_beside(self) -> SlicedTensor | None:
        """`beside`, which is none from then on."""
        beside, self.beside = self.beside, None
        return beside

    @staticmethod
    def __new__(cls, local: Tensor, slicing: Slicing) -> PendingGradient:
        tensor = SlicedTensor.__new__(cls, local, slicing)
        assert isinstance(tensor, PendingGradient)
        tensor.cleared, tensor.beside = False, None
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func is aten.zero_.default:
            args[0].cleared, args[0].beside = True, None
            return args[0]
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        if func is aten.detach.default:
            return args[0]
        if func in (aten.add.Tensor, aten.add_.Tensor) and in_backward() and isinstance(args[0], PendingGradient):
            # A penalty in the loss, whose gradient is one of slices and needs no reduce.
            args[0].beside = args[1] if args[0].beside is None else args[0].beside + args[1]
            return args[0]
        found = next(t for t in _flat(args) if isinstance(t, PendingGradient))
        raise UsageError(
            f"the gradient of {found.slicing.name!r} has not been reduced yet. Either micro-batches were run under "
            "no_sync(), or fewer micro-batches than accumulate= were run, or only parts of the model were called. "
            "Run the last micro-batch, or call model.reduce_gradients() before clipping or stepping."
        )


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [item for argument in args for item in (argument if isinstance(argument, list | tuple) else [argument])]
