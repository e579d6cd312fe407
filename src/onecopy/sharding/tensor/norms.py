"""Norms of SlicedTensors: the sum over this rank's elements now, the sum over ranks once, when it is needed.

`clip_grad_norm_` takes the norm of every gradient, stacks them and takes the norm of the stack. A collective for each
gradient would cost more than the clipping. So the norm of a slice is a `PartialNorm`, which can be stacked and normed
again while it is partial, and becomes a plain tensor (one collective) on any other use. The clipped norm is therefore
the global one, at one collective a call, with the loop left as written.

Under tensor parallelism the elements of some parameters are spread over the tensor axis too, those of replicated ones
are not. So every norm knows the axes of its own, and there is one collective for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.sharding.tensor.precision import PIECE_NUMEL

aten = torch.ops.aten

Spread = tuple[Axis, ...]
"""Mesh axes along which the elements of a parameter lie."""


class PartialNorm(torch.Tensor):
    """Norms of order p whose contributions from other ranks are still to be added.

    Attributes:
        powers: this rank's sums of |x|^p, float64 (for p = inf: its maxima); shape of the tensor itself.
        order: p.
        spread: for each element of ``powers`` the axes over which to add.
    """

    powers: Tensor
    order: float
    spread: tuple[Spread, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, powers: Tensor, order: float, spread: tuple[Spread, ...], dtype: torch.dtype) -> PartialNorm:
        tensor: PartialNorm = torch.Tensor._make_wrapper_subclass(cls, powers.shape, dtype=dtype, device=powers.device)
        tensor.powers = powers
        tensor.order = order
        tensor.spread = spread
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.stack.default and len(args) == 1 and _alike(args[0]):
            return _stacked(args[0])
        if func is aten.linalg_vector_norm.default and len(args) == 2 and float(args[1]) == args[0].order:
            return args[0].norm_of_all()
        if func is aten.detach.default:
            return args[0]
        return func(*[_resolved(a) for a in args], **{k: _resolved(v) for k, v in kwargs.items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialNorm(order={self.order}, shape={tuple(self.shape)})"

    def resolve(self) -> Tensor:
        """The norms over all ranks, as a plain tensor. One collective for each axis."""
        return self._root(self._over_ranks(self.powers.reshape(-1), self.spread)).reshape(self.shape)

    def norm_of_all(self) -> Tensor:
        """The norm of the norms over all ranks: of what is spread alike the sum is taken before it is sent."""
        kinds = list(dict.fromkeys(self.spread))
        flat = self.powers.reshape(-1)
        sums = [self._total(_pick(flat, [spread == kind for spread in self.spread])) for kind in kinds]
        return self._root(self._total(self._over_ranks(torch.stack(sums), kinds)))

    def _over_ranks(self, powers: Tensor, spread: Sequence[Spread]) -> Tensor:
        for axis in dict.fromkeys(axis for axes in spread for axis in axes):
            along = [axis in axes for axes in spread]
            part = _pick(powers, along).clone()
            if collective := axis.combine(part, "norm", maximum=math.isinf(self.order)):
                collective.finish()
                combined = iter(part.unbind())
                pairs = zip(powers.unbind(), along, strict=True)
                powers = torch.stack([next(combined) if picked else power for power, picked in pairs])
        return powers

    def _total(self, powers: Tensor) -> Tensor:
        return powers.amax() if math.isinf(self.order) else powers.sum()

    def _root(self, powers: Tensor) -> Tensor:
        return (powers if math.isinf(self.order) else powers.pow(1.0 / self.order)).to(self.dtype)

    @staticmethod
    def finish(norms: list[Tensor]) -> list[Tensor]:
        """Plain norms for a list of plain and partial ones; one collective for each axis where these are alike."""
        partial = [n for n in norms if isinstance(n, PartialNorm)]
        if not _alike(partial):
            return [n.resolve() if isinstance(n, PartialNorm) else n for n in norms]
        whole = iter(_stacked(partial).resolve().unbind())
        return [next(whole) if isinstance(n, PartialNorm) else n for n in norms]


def partial_norm(local: Tensor, spread: Spread, order: float, dtype: torch.dtype) -> PartialNorm:
    """The norm of a sharded tensor, of which this rank knows the part of its own elements ``local`` (1-D).

    Args:
        spread: the axes along which its other elements lie.

    Raises:
        ValueError: for orders 0 and below, which count or minimise over elements that a slice may not have.
    """
    if order <= 0:
        raise ValueError(
            f"the norm of a sharded tensor must have an order above 0, or inf; found {order}. For other orders take "
            "the norm inside `with onecopy.gathered(...)`."
        )
    if local.numel() == 0:
        powers = torch.zeros((), dtype=torch.float64, device=local.device)
    else:
        powers = _powers(local, order, torch.promote_types(dtype, torch.float32))
    return PartialNorm(powers, order, (spread,), dtype)


def _powers(local: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if local.dtype != dtype and local.numel() > PIECE_NUMEL:
        # On CPU torch widens all it is given before it sums.
        pieces = torch.stack([_powers(piece, order, dtype) for piece in local.split(PIECE_NUMEL)])
        return pieces.amax() if math.isinf(order) else pieces.sum()
    norm: Tensor = torch.linalg.vector_norm(local, order, dtype=dtype).double()
    return norm if math.isinf(order) else norm.pow(order)


def _pick(powers: Tensor, wanted: Sequence[bool]) -> Tensor:
    """Those of ``powers`` (1-D) that are wanted. To index by a list, the host would wait for the device."""
    if all(wanted):
        return powers
    return torch.stack([power for power, is_wanted in zip(powers.unbind(), wanted, strict=True) if is_wanted])


def _stacked(norms: Sequence[PartialNorm]) -> PartialNorm:
    spread = tuple(axes for n in norms for axes in n.spread)
    return PartialNorm(torch.stack([n.powers for n in norms]), norms[0].order, spread, norms[0].dtype)


def _alike(norms: Any) -> bool:
    return bool(norms) and all(
        isinstance(n, PartialNorm) and n.order == norms[0].order and n.dtype == norms[0].dtype for n in norms
    )


def _resolved(argument: Any) -> Any:
    if isinstance(argument, PartialNorm):
        return argument.resolve()
    if isinstance(argument, list | tuple):
        return [_resolved(item) for item in argument]
    return argument
