"""Norms of SlicedTensors: the sum over this rank's elements now, the sum over the shard axis once, when it is needed.

`clip_grad_norm_` takes the norm of every gradient, stacks them and takes the norm of the stack. A collective for each
gradient would cost more than the clipping. So the norm of a slice is a `PartialNorm`, which can be stacked and normed
again while it is partial, and becomes a plain tensor (one collective) on any other use. The clipped norm is therefore
the global one, at one collective a call, with the loop left as written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis

aten = torch.ops.aten


class PartialNorm(torch.Tensor):
    """Norms of order p whose contributions from other ranks are still to be added.

    Attributes:
        powers: this rank's sums of |x|^p, float64 (for p = inf: its maxima); shape of the tensor itself.
        order: p.
        axis: the axis over which to add.
    """

    powers: Tensor
    order: float
    axis: Axis

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, powers: Tensor, order: float, axis: Axis, dtype: torch.dtype) -> PartialNorm:
        tensor: PartialNorm = torch.Tensor._make_wrapper_subclass(cls, powers.shape, dtype=dtype, device=powers.device)
        tensor.powers = powers
        tensor.order = order
        tensor.axis = axis
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.stack.default and len(args) == 1 and _alike(args[0]):
            first = args[0][0]
            return PartialNorm(torch.stack([n.powers for n in args[0]]), first.order, first.axis, first.dtype)
        if func is aten.linalg_vector_norm.default and len(args) == 2 and float(args[1]) == args[0].order:
            partial = args[0]
            total = partial.powers.amax() if math.isinf(partial.order) else partial.powers.sum()
            return PartialNorm(total, partial.order, partial.axis, partial.dtype).resolve()
        if func is aten.detach.default:
            return args[0]
        return func(*[_resolved(a) for a in args], **{k: _resolved(v) for k, v in kwargs.items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialNorm(order={self.order}, shape={tuple(self.shape)})"

    def resolve(self) -> Tensor:
        """The norms over all ranks, as a plain tensor. One collective."""
        powers = self.powers.reshape(-1).clone()
        if collective := self.axis.combine(powers, "norm", maximum=math.isinf(self.order)):
            collective.finish()
        norms = powers if math.isinf(self.order) else powers.pow(1.0 / self.order)
        return norms.to(self.dtype).reshape(self.shape)

    @staticmethod
    def finish(norms: list[Tensor]) -> list[Tensor]:
        """Plain norms for a list of plain and partial ones, with one collective when all partial ones are alike."""
        partial = [n for n in norms if isinstance(n, PartialNorm)]
        if not _alike(partial):
            return [n.resolve() if isinstance(n, PartialNorm) else n for n in norms]
        first = partial[0]
        stacked = PartialNorm(torch.stack([n.powers for n in partial]), first.order, first.axis, first.dtype)
        whole = iter(stacked.resolve().unbind())
        return [next(whole) if isinstance(n, PartialNorm) else n for n in norms]


def partial_norm(local: Tensor, axis: Axis, order: float, dtype: torch.dtype) -> PartialNorm:
    """The norm of a sharded tensor, of which this rank knows the part of its own elements ``local`` (1-D).

    Raises:
        ValueError: for orders 0 and below, which count or minimise over elements that a slice may not have.
    """
    if order <= 0:
        raise ValueError(f"the norm of a sharded tensor has order > 0 or inf; found {order}. Gather it first.")
    if local.numel() == 0:
        powers = torch.zeros((), dtype=torch.float64, device=local.device)
    else:
        norm = torch.linalg.vector_norm(local, order, dtype=torch.promote_types(dtype, torch.float32)).double()
        powers = norm if math.isinf(order) else norm.pow(order)
    return PartialNorm(powers, order, axis, dtype)


def _alike(norms: Any) -> bool:
    return bool(norms) and all(
        isinstance(n, PartialNorm)
        and n.order == norms[0].order
        and n.axis is norms[0].axis
        and n.dtype == norms[0].dtype
        for n in norms
    )


def _resolved(argument: Any) -> Any:
    if isinstance(argument, PartialNorm):
        return argument.resolve()
    if isinstance(argument, list | tuple):
        return [_resolved(item) for item in argument]
    return argument
