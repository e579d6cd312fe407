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
from onecopy.sharding.boundary import in_backward
from onecopy.sharding.sliced import SlicedTensor, Slicing

aten = torch.ops.aten


class PendingGradient(SlicedTensor):
    """Stands for a gradient that is still to be reduced.

    Attributes:
        cleared: `zero_grad(set_to_none=False)` has set the kept gradient to zero.
    """

    cleared: bool

    @staticmethod
    def __new__(cls, local: Tensor, slicing: Slicing) -> PendingGradient:
        tensor = SlicedTensor.__new__(cls, local, slicing)
        assert isinstance(tensor, PendingGradient)
        tensor.cleared = False
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func is aten.zero_.default:
            args[0].cleared = True
            return args[0]
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        if func is aten.detach.default:
            return args[0]
        if func in (aten.add.Tensor, aten.add_.Tensor) and in_backward():
            raise UsageError(
                f"{args[0].slicing.name!r} has a part in the loss outside of the model's forward (a penalty, say), and "
                f"its gradient came while those of earlier micro-batches wait to be reduced: add it to the loss of the "
                f"step's first micro-batch alone, as often as there are micro-batches."
            )
        found = next(t for t in _flat(args) if isinstance(t, PendingGradient))
        raise UsageError(
            f"the gradient of {found.slicing.name!r} has not been reduced yet: micro-batches were run under no_sync() "
            f"or fewer than accumulate= of them. Run the last one, or call model.reduce_gradients() before clipping "
            f"or stepping."
        )


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [item for argument in args for item in (argument if isinstance(argument, list | tuple) else [argument])]
