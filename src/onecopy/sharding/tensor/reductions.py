"""Reductions of SlicedTensors to one value: this rank's part now, all ranks' parts in one collective, folded in order.

`sum`, `mean`, `max`, `any`, … of all elements are what they are of the whole tensor, on every rank. One over some
dimensions only (`dim=`) is left to `needs_whole`.
In a loss they have gradients, which is `recorded.py`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.errors import NeedsWholeError
from onecopy.sharding.tensor.elements import needs_whole, part
from onecopy.sharding.tensor.norms import PartialNorm, partial_norm
from onecopy.sharding.tensor.precision import PIECE_NUMEL
from onecopy.sharding.tensor.recorded import Recorded, is_recorded, record
from onecopy.sharding.tensor.sliced import Rule, SlicedTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class _Reduction:
    """How one kind of reduction is put together.

    Attributes:
        take: of a rank's elements (1-D, at least one) the numbers that it contributes.
        nothing: what a rank without elements contributes; by dtype, float64 or int64.
        fold: the numbers of all ranks, shape (ranks, numbers), to those of all elements.
        finish: those, and the operation's `correction`, to the values that the operation returns.
    """

    take: Callable[[Tensor], list[Tensor]]
    nothing: Callable[[torch.dtype], list[float]]
    fold: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, int, float], list[Tensor]] = lambda numbers, numel, correction: [numbers[0]]


def _in_pieces(values: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    # On CPU torch widens all it is given before it reduces.
    pieces = values.split(PIECE_NUMEL) if values.dtype in (torch.float16, torch.bfloat16) else (values,)
    return torch.stack([act(piece).to(_exact(values.dtype)) for piece in pieces])


def _exact(dtype: torch.dtype) -> torch.dtype:
    """One that holds every value of ``dtype``, and in which they are folded."""
    return torch.float64 if dtype.is_floating_point else torch.int64


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64


def _sum(values: Tensor) -> Tensor:
    return _in_pieces(values, lambda piece: piece.sum(dtype=_wide(values.dtype))).sum()


def _prod(values: Tensor) -> Tensor:
    return _in_pieces(values, lambda piece: piece.prod(dtype=_exact(values.dtype))).prod()


def _moments(values: Tensor) -> list[Tensor]:
    """Number, mean and sum of squares about it; Chan, Golub and LeVeque's, for numbers that stay exact."""
    wide = values.double()
    mean = wide.mean()
    return [torch.tensor(float(values.numel()), dtype=torch.float64), mean, (wide - mean).square().sum()]


def _fold_moments(parts: Tensor) -> Tensor:
    counts, means, squares = parts.unbind(1)
    mean = (counts * means).sum() / counts.sum()
    return torch.stack([counts.sum(), mean, (squares + counts * (means - mean).square()).sum()])


def _variance(numbers: Tensor, numel: int, correction: float) -> list[Tensor]:
    return [numbers[2] / max(numel - correction, 0)]


def _deviation(numbers: Tensor, numel: int, correction: float) -> list[Tensor]:
    return [_variance(numbers, numel, correction)[0].sqrt()]


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(torch.int64).min


def _most(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(torch.int64).max


def _add(parts: Tensor) -> Tensor:
    return parts.sum(0)


_SUM = _Reduction(lambda v: [_sum(v)], lambda d: [0], _add)
_MEAN = _Reduction(_SUM.take, _SUM.nothing, _add, lambda numbers, numel, _: [numbers[0] / numel])
_NANSUM = _Reduction(lambda v: [_sum(v.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))], _SUM.nothing, _add)
_PROD = _Reduction(lambda v: [_prod(v)], lambda d: [1], lambda parts: parts.prod(0))
_MAX = _Reduction(lambda v: [v.amax()], lambda d: [_least(d)], lambda parts: parts.amax(0))
_MIN = _Reduction(lambda v: [v.amin()], lambda d: [_most(d)], lambda parts: parts.amin(0))
_MIN_AND_MAX = _Reduction(
    lambda v: [v.amin(), -v.amax().to(_exact(v.dtype))],
    lambda d: [_most(d), -_least(d) if d.is_floating_point else _most(d)],
    lambda parts: parts.amin(0),
    lambda numbers, numel, _: [numbers[0], -numbers[1]],
)
_ANY = _Reduction(lambda v: [v.any()], lambda d: [0], lambda parts: parts.amax(0))
_ALL = _Reduction(lambda v: [v.all()], lambda d: [1], lambda parts: parts.amin(0))
_COUNT = _Reduction(lambda v: [v.count_nonzero()], lambda d: [0], _add)
_VAR = _Reduction(_moments, lambda d: [0, 0, 0], _fold_moments, _variance)
_STD = _Reduction(_moments, lambda d: [0, 0, 0], _fold_moments, _deviation)

_BY_OPERATION: dict[Any, _Reduction] = {
    aten.sum.default: _SUM,
    aten.sum.dim_IntList: _SUM,
    aten.mean.default: _MEAN,
    aten.mean.dim: _MEAN,
    aten.nansum.default: _NANSUM,
    aten.prod.default: _PROD,
    aten.prod.dim_int: _PROD,
    aten.max.default: _MAX,
    aten.amax.default: _MAX,
    aten.min.default: _MIN,
    aten.amin.default: _MIN,
    aten.aminmax.default: _MIN_AND_MAX,
    aten.any.default: _ANY,
    aten.any.dim: _ANY,
    aten.any.dims: _ANY,
    aten.all.default: _ALL,
    aten.all.dim: _ALL,
    aten.all.dims: _ALL,
    aten.count_nonzero.default: _COUNT,
    aten.count_nonzero.dim_IntList: _COUNT,
    aten.var.correction: _VAR,
    aten.std.correction: _STD,
}
_COUNTS = (_ANY, _ALL, _COUNT)


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: SlicedTensor = args[0]
    results = _shapes_of(func, args, kwargs)
    # An operation that leaves one value has gone over all elements.
    if source.dtype.is_complex or any(result.numel() != 1 for result in results):
        needs_whole(func, args, kwargs)
    if source.numel() == 0:
        return func(torch.empty(source.shape, dtype=source.dtype, device=source.device), *args[1:], **kwargs)
    reduction = _BY_OPERATION[func]
    if reduction in (_VAR, _STD) and not source.dtype.is_floating_point:
        needs_whole(func, args, kwargs)
    recorded = is_recorded(source) and results[0].dtype.is_floating_point
    if recorded and reduction is _PROD:
        raise NeedsWholeError(
            f"the gradient of prod of {source.slicing.name!r} needs the whole tensor: take prod inside `with "
            "onecopy.gathered(...)`, or of p.detach() if you need no gradient."
        )
    local = source.local
    if (wanted := kwargs.get("dtype")) is not None:
        local = local.to(wanted)
    exact = torch.int64 if reduction in _COUNTS else _exact(local.dtype)
    taken = reduction.take(local) if local.numel() else reduction.nothing(exact)
    numbers = torch.stack([torch.as_tensor(n, dtype=exact, device=local.device) for n in taken])
    for axis in source.slicing.spread:
        numbers = reduction.fold(_gather(numbers, axis))
    correction = kwargs.get("correction", 1)
    values = reduction.finish(numbers, source.numel(), 1 if correction is None else correction)
    finished = [v.to(r.dtype).reshape(r.shape) for v, r in zip(values, results, strict=True)]
    if recorded:
        finished = [Recorded(value, source.slicing) for value in finished]
    return finished[0] if len(finished) == 1 else tuple(finished)


def _gather(numbers: Tensor, axis: Axis) -> Tensor:
    """Every rank's ``numbers`` (1-D), in the order of ranks; shape (ranks, numbers)."""
    gathered = numbers.new_zeros(axis.size, numbers.numel())
    gathered[axis.rank] = numbers
    if collective := axis.combine(flat := gathered.reshape(-1), "norm"):
        collective.finish()
    return flat.reshape(gathered.shape)


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What the operation would return of the whole tensor, on the meta device; its errors are torch's own."""
    whole = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
    results = func(whole, *args[1:], **kwargs)
    return list(results) if isinstance(results, tuple) else [results]


def _agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`torch.equal` and `torch.allclose`: alike in all elements, on all ranks."""
    source = next(a for a in args if isinstance(a, SlicedTensor))
    same = func(*[part(a, source.slicing, func) for a in args], **kwargs)
    numbers = torch.tensor([int(same)], device=source.local.device)
    for axis in source.slicing.spread:
        numbers = _gather(numbers, axis).amin(0)
    return bool(numbers.item())


# --- norms


def partial_norm_of(tensor: SlicedTensor, order: Any, dtype: torch.dtype | None) -> PartialNorm:
    """The norm of all elements, of which this rank knows its own part."""
    # Refused here, on all ranks: below, a rank without elements would not find it out and would wait for the others.
    if not (dtype or tensor.dtype).is_floating_point or not tensor.dtype.is_floating_point:
        raise NeedsWholeError(
            f"the norm of the sharded {tensor.slicing.name!r} needs real numbers; found {tensor.dtype}. Take it "
            "inside `with onecopy.gathered(...)`."
        )
    if float(order) <= 0:
        raise NeedsWholeError(
            f"the norm of the sharded {tensor.slicing.name!r} must have an order above 0, or inf; found {order}. For "
            "other orders take it inside `with onecopy.gathered(...)`."
        )
    return partial_norm(tensor.local, tensor.slicing.spread, float(order), dtype or tensor.dtype)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norm_of_all(func, args, kwargs, order)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("p")
    return _norm_of_all(func, args, kwargs, 2 if order is None else order)


def _norm_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], order: Any) -> Tensor:
    (result,) = _shapes_of(func, args, kwargs)
    source: SlicedTensor = args[0]
    if source.dtype.is_complex or (result.numel() != 1 and source.numel() > 0):
        needs_whole(func, args, kwargs)
    norm = record(partial_norm_of(source, order, result.dtype), source)
    return norm if result.dim() == 0 else norm.reshape(result.shape)


REDUCTIONS: dict[Any, Rule] = dict.fromkeys(_BY_OPERATION, _reduce) | {
    aten.equal.default: _agree,
    aten.allclose.default: _agree,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
}
"""What `operations.py` takes into its table."""
