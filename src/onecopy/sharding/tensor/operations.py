"""What operations do to SlicedTensors.

- Elementwise ones act on the local slices (`elements.py`), and those on lists of tensors row by row (`lists.py`).
- Reductions over all elements, norms among them, take one collective (`reductions.py`, `norms.py`).
- A write to a parameter tells its bucket beforehand: other ranks may be reading it, and gathered copies go stale.
  Version counters would not: they do not move under `_foreach_*` and `_fused_*`.
- Everything else needs the whole parameter and raises `NeedsWholeError`.

The rule for an operation is found once and kept in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.errors import NeedsWholeError, UsageError
from onecopy.sharding.tensor.elements import (
    advice,
    first_sliced,
    needs_whole,
    part,
    refuse_write,
    writes_out,
    written,
    written_values,
)
from onecopy.sharding.tensor.lists import OnLists, foreach_norm, is_of_lists, unscale
from onecopy.sharding.tensor.reductions import REDUCTIONS
from onecopy.sharding.tensor.sliced import RULES, Rule, SlicedTensor, Slicing, same_device

aten = torch.ops.aten


def _find_rule(func: Any) -> Rule:
    name: str = func._schema.name.removeprefix("aten::")
    if is_of_lists(func):
        base = name.removeprefix("_foreach_")
        return OnLists(func) if name.startswith("_fused_") or _is_elementwise(base, func) else needs_whole
    return _Elementwise(func) if _is_elementwise(name, func) else needs_whole


# Of the same name as elementwise ones, or tagged as such, though they are about all elements, or draw random numbers.
_NOT_ELEMENTWISE = ("equal", "is_nonzero", "max", "min", "rrelu")
# torch tags these in no variant.
_ELEMENTWISE = ("zero", "fill", "copy")


def _is_elementwise(name: str, func: Any) -> bool:
    """Whether the operation is tagged so, or another variant of it: torch tags `abs` and not `abs_`."""
    name = name.rstrip("_")
    if name in _NOT_ELEMENTWISE or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return True
    packet = getattr(aten, name, None) if func.namespace == "aten" else None
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, variant).tags for variant in packet.overloads()
    )


class _Elementwise:
    """The rule of one elementwise operation. It may write to arguments, into `out=` too, and return several tensors."""

    def __init__(self, func: Any) -> None:
        self._writes = written(func)
        self._into_out = writes_out(func)
        # What fills is a number, a tensor without dimensions even beside a parameter that has none.
        numbers = [i for i, a in enumerate(func._schema.arguments) if a.name == "value" and str(a.type) == "Tensor"]
        self._number = numbers[0] if numbers else None

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        like: Any = args[0] if args and isinstance(args[0], SlicedTensor) else first_sliced(args, kwargs)
        slicing = like.slicing
        targets = self._targets(func, slicing, args, kwargs) if self._writes else ()
        try:
            # Most calls of an optimizer's loop end with the first condition.
            parts = [
                a.local if isinstance(a, SlicedTensor) and a.slicing is slicing else part(a, slicing, func)
                for a in args
            ]
        except NeedsWholeError as error:
            raise NeedsWholeError(f"{error}{advice(like)}") from None
        if self._number is not None and self._number < len(args):
            if isinstance(args[self._number], SlicedTensor):
                needs_whole(func, args, kwargs)
            parts[self._number] = args[self._number]
        parts_by_name = {name: part(v, slicing, func) for name, v in kwargs.items()}
        for target in targets:
            if target._on_write is not None:
                target._on_write()
        results = func(*parts, **parts_by_name)
        if not targets:
            if isinstance(results, Tensor):
                return SlicedTensor(results, slicing)
            return tuple(SlicedTensor(result, slicing) for result in results)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _targets(self, func: Any, slicing: Slicing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """What the operation writes to, all of it slices."""
        if self._writes == (0,) and isinstance(args[0], SlicedTensor):
            return args[:1]
        targets = written_values(func, self._writes, args, kwargs)
        for target in targets:
            if not isinstance(target, SlicedTensor):
                refuse_write(func, slicing, target)
        if self._into_out and not any(isinstance(a, Tensor) and a.shape == slicing.shape for a in args):
            # torch would make `out=` as small as what is written to it.
            needs_whole(func, args, kwargs)
        return targets


# --- operations with rules of their own


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    return SlicedTensor(source.local, source.slicing, on_write=source._on_write)


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    _refuse_other_device(source, kwargs.get("device"))
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return SlicedTensor(func(source.local, *args[1:], **kwargs), source.slicing)


def _new_of_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`p.new_zeros(size)` and the like: a slice if of the parameter's own size, as states are; else a plain tensor."""
    source: SlicedTensor = args[0]
    strided = func is aten.new_empty_strided.default
    if torch.Size(args[1]) != source.shape or not (source.shape or strided):
        plain: Tensor = func(source.local, *args[1:], **kwargs)
        return plain
    make, given = (aten.new_empty.default, args[3:]) if strided else (func, args[2:])
    return SlicedTensor(make(source.local, list(source.local.shape), *given, **kwargs), source.slicing)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    source: SlicedTensor = args[0]
    _refuse_other_device(source, kwargs.get("device"))
    _refuse_other_order(source, kwargs.get("memory_format"))
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return SlicedTensor(func(source.local, **kwargs), source.slicing)


def _refuse_other_device(source: SlicedTensor, device: torch.device | None) -> None:
    """`.to(device)` and `.to_empty(...)` of a module would leave the engine with the old slices.

    `.half()` and the like assign to `.data`, which refuses another dtype.
    """
    if device is not None and isinstance(source, torch.nn.Parameter) and not same_device(device, source.device):
        raise UsageError(
            f"{source.slicing.name!r} is sharded on {source.device} and cannot be moved to {device}: move the model "
            "before onecopy.shard, or give a meta model memory with onecopy.materialize. To copy one slice to "
            "another device: p.detach().to(...)."
        )


def _refuse_other_order(source: SlicedTensor, order: torch.memory_format | None) -> None:
    """`.to(memory_format=)` of a module would change nothing and say nothing."""
    if order is None or order == torch.preserve_format or not isinstance(source, torch.nn.Parameter):
        return
    if not source.is_contiguous(memory_format=order):
        raise UsageError(
            f"{source.slicing.name!r} is sharded, and its elements stay in the order in which they lay before, which "
            f"is not {order}: call model.to(memory_format={order}) before onecopy.shard."
        )


RULES.find = _find_rule
RULES.update(
    {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.clone.default: _new_like,
        aten.zeros_like.default: _new_like,
        aten.ones_like.default: _new_like,
        aten.empty_like.default: _new_like,
        aten.full_like.default: _new_like,
        aten.new_zeros.default: _new_of_size,
        aten.new_ones.default: _new_of_size,
        aten.new_full.default: _new_of_size,
        aten.new_empty.default: _new_of_size,
        aten.new_empty_strided.default: _new_of_size,
        aten._to_copy.default: _to_copy,
        aten._foreach_norm.Scalar: foreach_norm,
        aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    }
    | REDUCTIONS
)
