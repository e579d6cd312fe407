"""What operations do to SlicedTensors.

- Elementwise ones, among them everything `_foreach_*` and `_fused_*`, act on the local slices: one dispatch a call.
- Norms reduce over the shard axis (`norms.py`), as does GradScaler's search for infinities.
- A write to a parameter tells its bucket that gathered copies are stale. Version counters would not: they do not move
  under `_foreach_*` and `_fused_*`.
- Everything else needs the whole parameter and raises `NeedsWholeError`.

The rule for an operation is found once and kept in a table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecopy.errors import NeedsWholeError, UsageError
from onecopy.sharding.norms import PartialNorm, partial_norm
from onecopy.sharding.sliced import RULES, Rule, SlicedTensor

aten = torch.ops.aten


def _find_rule(func: Any) -> Rule:
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
        return _InPlaceLists(func) if not func._schema.returns else _lists
    if name.startswith("_foreach_norm"):
        return _foreach_norm
    if (torch.Tag.pointwise in func.tags and name not in _COMPARISONS) or name in _ELEMENTWISE:
        return _in_place if written(func) else _elementwise
    return _needs_whole


_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
# Tagged as elementwise, though their answer is about the whole tensor.
_COMPARISONS = ("equal", "is_nonzero")
_ELEMENTWISE = ("zero_", "fill_", "masked_fill_", "masked_fill", "copy_", "clone", "zero", "fill", "copy")


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _first_sliced(args, kwargs)
    local = func(*[_local(a, like, func) for a in args], **{k: _local(v, like, func) for k, v in kwargs.items()})
    return SlicedTensor(local, like.slicing) if isinstance(local, Tensor) else local


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, SlicedTensor):
        _needs_whole(func, args, kwargs)
    local_args, local_kwargs = (
        [_local(a, target, func) for a in args],
        {k: _local(v, target, func) for k, v in kwargs.items()},
    )
    if target._on_write is not None:
        target._on_write()
    func(*local_args, **local_kwargs)
    return target


def _lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    results = func(*[_locals(a) for a in args], **{k: _locals(v) for k, v in kwargs.items()})
    return [
        SlicedTensor(local, like.slicing) if isinstance(like, SlicedTensor) else local
        for local, like in zip(results, args[0], strict=True)
    ]


class _InPlaceLists:
    """`_foreach_*_` and `_fused_*_`: unwrap flat lists, call once, mark what was written."""

    def __init__(self, func: Any) -> None:
        self._writes = written(func)

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position in self._writes:
            if position < len(args):
                _tell_written(args[position])
        func(*[_locals(a) for a in args], **{k: _locals(v) for k, v in kwargs.items()})


def _tell_written(tensors: Any) -> None:
    owners = (
        {t._on_write for t in tensors if isinstance(t, SlicedTensor)} if isinstance(tensors, list | tuple) else set()
    )
    for tell in owners:
        if tell is not None:
            tell()


def _locals(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [t.local if isinstance(t, SlicedTensor) else t for t in argument]
    return argument.local if isinstance(argument, SlicedTensor) else argument


def _local(argument: Any, like: SlicedTensor, func: Any) -> Any:
    """The part of ``argument`` that meets the elements held by ``like``."""
    if isinstance(argument, SlicedTensor):
        if not like.slicing.matches(argument.slicing):
            raise NeedsWholeError(
                f"{_name(func)} of {like.slicing.name!r} {tuple(like.shape)} and {argument.slicing.name!r} "
                f"{tuple(argument.shape)} would mix different elements; use it inside `with onecopy.gathered(...)`."
            )
        return argument.local
    if isinstance(argument, Tensor) and argument.dim() > 0:
        if argument.shape != like.shape:
            raise NeedsWholeError(
                f"{_name(func)} would broadcast shape {tuple(argument.shape)} over the sharded {like.slicing.name!r} "
                f"{tuple(like.shape)}; use it inside `with onecopy.gathered(...)`.{_advice(like)}"
            )
        return like.slicing.cut(argument)
    return argument


# --- operations with rules of their own


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    return SlicedTensor(source.local, source.slicing, on_write=source._on_write)


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    _refuse_conversion(source, None, kwargs.get("device"))
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return SlicedTensor(func(source.local, *args[1:], **kwargs), source.slicing)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    _refuse_conversion(source, kwargs.get("dtype"), kwargs.get("device"))
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return SlicedTensor(func(source.local, **kwargs), source.slicing)


def _refuse_conversion(source: SlicedTensor, dtype: torch.dtype | None, device: torch.device | None) -> None:
    """`.half()`, `.to(...)` and `.to_empty(...)` of a module would leave the engine with the old slices."""
    if not isinstance(source, torch.nn.Parameter):
        return
    changed = dtype if dtype not in (None, source.dtype) else device if device not in (None, source.device) else None
    if changed is not None:
        raise UsageError(
            f"{source.slicing.name!r} is sharded as {source.dtype} on {source.device} and cannot become {changed}: "
            f"convert the model before onecopy.shard, choose the compute dtype there with precision=, or "
            f"materialise a meta model with onecopy.materialize. A converted copy of one slice: p.detach().to(...)."
        )


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source: SlicedTensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    along = args[2] if len(args) > 2 else kwargs.get("dim")
    if along is not None and len(along) not in (0, source.dim()):
        _needs_whole(func, args, kwargs)
    return _partial_norm(source, order, kwargs.get("dtype"))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("p")
    if len(args) > 2 and isinstance(args[2], list | tuple) and len(args[2]) not in (0, args[0].dim()):
        _needs_whole(func, args, kwargs)
    return _partial_norm(args[0], 2 if order is None else order, kwargs.get("dtype"))


def _partial_norm(tensor: SlicedTensor, order: Any, dtype: torch.dtype | None) -> PartialNorm:
    return partial_norm(tensor.local, tensor.slicing.spread, float(order), dtype or tensor.dtype)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    norms = [
        _partial_norm(t, order, None) if isinstance(t, SlicedTensor) else torch.linalg.vector_norm(t, order)
        for t in args[0]
    ]
    return PartialNorm.finish(norms)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler: an infinity that one rank sees in its slices is an infinity to all of them."""
    gradients, found, inverse_scale = args
    func(_locals(gradients), found, inverse_scale)
    for axis in dict.fromkeys(axis for t in gradients if isinstance(t, SlicedTensor) for axis in t.slicing.spread):
        worst = found.reshape(1)
        if collective := axis.combine(worst, "overflow", maximum=True):
            collective.finish()
            found.copy_(worst.reshape(found.shape))


def _needs_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _first_sliced(args, kwargs)
    raise NeedsWholeError(
        f"{_name(func)} needs the whole parameter {found.slicing.name!r} {tuple(found.shape)}, of which this rank "
        f"holds {found.slicing.numel} elements. Use it inside `with onecopy.gathered(model):`, or call the model (a "
        f"unit's parameters are whole while its forward runs).{_advice(found)}"
    )


def _advice(parameter: SlicedTensor) -> str:
    """What the engine that runs the model of ``parameter`` says to its use."""
    engine = parameter._engine() if parameter._engine is not None else None
    return str(engine.advise(parameter.slicing.name)) if engine is not None else ""


def _first_sliced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    for argument in (*args, *kwargs.values()):
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, SlicedTensor):
                return item
    raise AssertionError("dispatched without a SlicedTensor")


def written(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that the operation writes to."""
    return tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


RULES.find = _find_rule
RULES.update(
    {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.zeros_like.default: _new_like,
        aten.ones_like.default: _new_like,
        aten.empty_like.default: _new_like,
        aten.full_like.default: _new_like,
        aten._to_copy.default: _to_copy,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.norm.Scalar: _norm,
        aten.norm.ScalarOpt_dim: _norm,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    }
)
