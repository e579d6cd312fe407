"""Selective: in a recomputed call the outputs of matrix products and attention are kept, and only the rest is repeated.

These operations take nearly all of a block's time. PyTorch's `create_selective_checkpoint_contexts` keeps what they
return. In backward the call is made again: what was kept is handed out, and norms, activation functions, dropout and
the like are computed again. Two kinds of product are computed again too:

- Batched products (`bmm`). Attention without a fused kernel makes its scores with them, s² numbers for each head. These
  are what Korthikanti et al. (MLSys 2023, §5) recompute.
- Attention with dropout inside. An operation that is not repeated draws no random numbers, so every mask that follows
  it would differ from forward's.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from onecopy.comm.dtensors import local_of
from onecopy.errors import UsageError
from onecopy.observe.meter import Meter

aten = torch.ops.aten

_PRODUCTS: Final = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_mm.default,
        aten._grouped_mm.default,
        aten.convolution.default,
    }
)

DROPOUT_OF_ATTENTION: Final = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_fused_attention_overrideable.default: 4,
    aten._flash_attention_forward.default: 7,
    aten._efficient_attention_forward.default: 8,
}
"""Fused attention, each with the place of its argument ``dropout_p``."""


def is_kept(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the output of ``operation``, called with these arguments, is kept for backward."""
    if operation in _PRODUCTS:
        return True
    if (place := DROPOUT_OF_ATTENTION.get(operation)) is None:
        return False
    probability = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(probability == 0.0)


class Selective:
    """Keeps outputs in calls that are recomputed.

    Args:
        meter: where the kept bytes are counted, as "checkpoints".
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def contexts(self, kept: list[Tensor]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Two contexts, of a call and of its recomputation. The call appends what it keeps to ``kept``."""

        def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not is_kept(operation, args, kwargs):
                return CheckpointPolicy.PREFER_RECOMPUTE
            kept.extend(leaf for leaf in tree_leaves(context.op_output) if isinstance(leaf, Tensor))
            return CheckpointPolicy.MUST_SAVE

        call, again = create_selective_checkpoint_contexts(policy)
        return call, _InWords(again)

    def count(self, kept: list[Tensor], returned: Any) -> None:
        """Count the bytes that a call has kept, as long as they live.

        What the call has returned is left out: it lives without being kept, and is counted where it is an input.
        """
        leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        counted = [local_of(leaf).untyped_storage() for leaf in leaves]
        for tensor in kept:
            storage = local_of(tensor).untyped_storage()
            if all(storage is not one for one in counted):
                counted.append(storage)
                nbytes = storage.nbytes()
                self._meter.add("checkpoints", nbytes)
                weakref.finalize(storage, self._meter.add, "checkpoints", -nbytes)


class _InWords:
    """A recomputation's context, in which PyTorch's errors say what to do.

    They are those for a kept output that was written to, and for an operation that the forward had not run.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
        if not isinstance(error, RuntimeError):
            return
        if "encountered during backward" in str(error):
            raise UsageError(
                f"selective recomputation needs a unit that runs the same operations again, and this one does not: "
                f"{str(error).partition(' encountered')[0]} is new. What a unit changes outside of itself may be the "
                f"reason. A model of transformers keeps keys and values in training too: set model.config.use_cache = "
                f'False. Otherwise use checkpoint="units"'
            ) from error
        if "has been mutated" in str(error):
            raise UsageError(
                "the output of a matrix product or of attention, which selective recomputation keeps, was modified in "
                'place after it was computed: write y = y + x in place of y += x there, or use checkpoint="units"'
            ) from error
