"""Cross-entropy of a language model's head, a chunk of tokens at a time, so that logits never exist whole.

The head's product, its loss and the loss's gradients are computed for a chunk, and the logits go before the next. As
Liger's Triton kernel does it, gradients are made in forward: nothing is computed twice. PyTorch's own
`linear_cross_entropy` (2.13) does the same, but sums the loss in bf16 where its input is bf16, so that a loss of 9.78
is said to be 9.94 (`benchmarks/loss.py`), and Liger's needs Triton.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from onecopy.errors import SettingsError, UsageError
from onecopy.loss.chunks import chunk_rows

_NEVER: Final = -100


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = _NEVER,
    reduction: str = "mean",
    rows: int | None = None,
    tensor: ProcessGroup | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, labels)` without the logits in memory. To be called in the model's forward.

    A call holds the logits of one chunk, in fp32 and in ``hidden``'s dtype, and the gradients of ``hidden`` and
    ``weight`` until its backward, which may run once. With onecopy at stage 3 the weight is gathered once for all
    chunks, as its unit is.

    Args:
        hidden: (..., features), bf16 or fp32.
        weight: (classes, features), of the same dtype.
        labels: (...), int64; they are not shifted.
        ignore_index: a label whose token has no loss.
        reduction: "mean" over the tokens that have a loss, or "sum".
        rows: tokens of a chunk; None: an eighth of them, 128 at the least and 1,024 at most.
        tensor: ranks over which the classes are cut evenly, each of which has the same ``hidden`` and ``labels`` and
            its rows of the whole weight; three numbers a token are exchanged, and the gradient of ``hidden`` is this
            rank's part of a sum.

    Returns:
        A scalar in fp32, whatever the dtype of ``hidden``; nan as the mean of no tokens.

    Raises:
        SettingsError: for an unknown reduction, rows below 1, or fp16, in which gradients of a sum would overflow.
        UsageError: if its backward runs a second time.
    """
    if reduction not in ("mean", "sum"):
        raise SettingsError(f"reduction must be 'mean' or 'sum'; found {reduction!r}")
    if rows is not None and rows < 1:
        raise SettingsError(f"rows must be positive; found {rows}")
    if hidden.dtype is torch.float16:
        raise SettingsError(
            "chunked_cross_entropy sums gradients in its input's dtype, which fp16 cannot hold: use bf16"
        )
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        flat, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (flat, weight))
    with torch.autocast(kind, enabled=False):
        total: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            flat, weight, targets, ignore_index, rows or chunk_rows(len(flat)), tensor
        )
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _Chunked(torch.autograd.Function):
    """The sum of all losses; backward hands out what forward has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        rows: int,
        over: ProcessGroup | None,
    ) -> Tensor:
        first_class = 0 if over is None else dist.get_rank(over) * len(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for first in range(0, len(hidden), rows):
            part, targets = hidden[first : first + rows], labels[first : first + rows]
            counts = (targets != ignore_index)[:, None]
            targets = targets[:, None] - first_class
            # Those of other ranks' classes have no place here, and add nothing.
            here = counts & (targets >= 0) & (targets < len(weight))
            targets = targets.where(here, 0)
            # In place from here on: what is one name after the other is one tensor.
            logits = (part @ weight.T).float()
            logits -= _reduced(logits.amax(-1, keepdim=True), over, dist.ReduceOp.MAX)
            chosen = logits.gather(-1, targets) * here
            sums = logits.exp_().sum(-1, keepdim=True)
            chosen, sums = _reduced(torch.stack([chosen, sums]), over, dist.ReduceOp.SUM)
            total += ((sums.log() - chosen) * counts).sum()
            if of_hidden is None and of_weight is None:
                continue
            logits /= sums
            logits.scatter_add_(-1, targets, -here.to(logits.dtype))
            logits *= counts
            gradient = logits.to(hidden.dtype)
            del logits
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[first : first + rows])
            if of_weight is not None:
                of_weight.addmm_(gradient.T, part)
            del gradient
        ctx.gradients = (of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.gradients is None:
            raise UsageError(
                "the backward of a chunked loss ran a second time: its gradients are made once, and handed out."
            )
        found, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(gradients[0]) for g in found), None, None, None, None)


def _reduced(values: Tensor, over: ProcessGroup | None, how: Any) -> Tensor:
    if over is not None:
        dist.all_reduce(values, how, group=over)
    return values
