"""What `_foreach_*` and `_fused_*` do to SlicedTensors: row by row what the elementwise operation does, in one call.

A row is what stands at one place of an operation's lists. Its tensors may be of mixed kinds, as long as each meets the
same elements (`elements.py`); rows without a SlicedTensor are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.sharding.tensor.elements import needs_whole, part, refuse_write, writes_out, written, written_values
from onecopy.sharding.tensor.norms import PartialNorm
from onecopy.sharding.tensor.recorded import record
from onecopy.sharding.tensor.reductions import partial_norm_of
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


def is_of_lists(func: Any) -> bool:
    """Whether the operation acts on lists of tensors, row by row: `_foreach_*`, and `_fused_*` of optimizers."""
    name: str = func._schema.name
    if name.startswith("aten::_foreach_"):
        return True
    return name.startswith("aten::_fused_") and name.endswith("_") and 0 in written(func)


class OnLists:
    """The rule of one elementwise operation on lists."""

    def __init__(self, func: Any) -> None:
        self._writes = written(func)
        self._into_out = writes_out(func)
        # Fused optimizers count steps in tensors without dimensions, which meet nothing and are written to.
        self._counters = [a.name for a in func._schema.arguments].index("state_steps") if _counts(func) else None

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counters = args[self._counters] if self._counters is not None else None
        if counters is not None and any(isinstance(counter, SlicedTensor) for counter in counters):
            needs_whole(func, args, kwargs)
        rows = _rows([a for a in (*args, *kwargs.values()) if _is_list(a) and a is not counters])
        if rows is None:
            needs_whole(func, args, kwargs)
        targets = written_values(func, self._writes, args, kwargs) if self._writes else []
        for target in targets:
            if _is_list(target) and target is not counters:
                _check_written(func, target, rows)

        if self._into_out and not all(
            like is None or like.shape == i.shape for like, i in zip(rows, args[0], strict=True)
        ):
            needs_whole(func, args, kwargs)

        locals_ = [self._locals(a, rows, func) if a is not counters else a for a in args]
        locals_by_name = {name: self._locals(value, rows, func) for name, value in kwargs.items()}
        for target in targets:
            _tell_written(target)
        results = func(*locals_, **locals_by_name)
        if targets:
            return None
        return [local if like is None else SlicedTensor(local, like) for local, like in zip(results, rows, strict=True)]

    def _locals(self, argument: Any, rows: Sequence[Slicing | None], func: Any) -> Any:
        if _is_list(argument):
            return [
                item.local if isinstance(item, SlicedTensor) and item.slicing is like else _part(item, like, func)
                for item, like in zip(argument, rows, strict=True)
            ]
        if isinstance(argument, SlicedTensor):
            needs_whole(func, (argument,), {})
        return argument


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """One collective for all of them."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    norms = [
        partial_norm_of(t, order, dtype)
        if isinstance(t, SlicedTensor)
        else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in args[0]
    ]
    finished = PartialNorm.finish(norms)
    return [record(f, t) if isinstance(t, SlicedTensor) else f for f, t in zip(finished, args[0], strict=True)]


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler: an infinity that one rank sees in its slices is an infinity to all of them."""
    gradients, found, inverse_scale = args
    if isinstance(found, SlicedTensor) or isinstance(inverse_scale, SlicedTensor):
        needs_whole(func, args, kwargs)
    _tell_written(gradients)
    await_scale(found)
    func([t.local if isinstance(t, SlicedTensor) else t for t in gradients], found, inverse_scale)
    combine_overflow(gradients, found)


def await_scale(found: Tensor) -> None:
    """Where gradients are on the host, a device's scaler copies its scale and flag there, and does not wait."""
    if found.is_cpu and torch.accelerator.current_accelerator() is not None:
        torch.accelerator.current_stream().synchronize()


def combine_overflow(gradients: Sequence[Tensor], found: Tensor) -> None:
    """Let ``found`` (one element) tell of an infinity in any rank's slices."""
    for axis in dict.fromkeys(axis for t in gradients if isinstance(t, SlicedTensor) for axis in t.slicing.spread):
        worst = found.reshape(1)
        if collective := axis.combine(worst, "overflow", maximum=True):
            collective.finish()
            found.copy_(worst.reshape(found.shape))


def _counts(func: Any) -> bool:
    return any(argument.name == "state_steps" for argument in func._schema.arguments)


def _part(item: Any, like: Slicing | None, func: Any) -> Any:
    return item if like is None else part(item, like, func)


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], Tensor)


def _rows(lists: Sequence[Sequence[Any]]) -> list[Slicing | None] | None:
    """For each row the slice that is acted on, None where it has none. None if lists differ in length."""
    rows = [item.slicing if isinstance(item, SlicedTensor) else None for item in lists[0]]
    for others in lists[1:]:
        if len(others) != len(rows):
            return None
        if None in rows:
            for index, item in enumerate(others):
                if rows[index] is None and isinstance(item, SlicedTensor):
                    rows[index] = item.slicing
    return rows


def _check_written(func: Any, target: Sequence[Any], rows: Sequence[Slicing | None]) -> None:
    for item, like in zip(target, rows, strict=True):
        if like is not None and not isinstance(item, SlicedTensor):
            refuse_write(func, like, item)


def _tell_written(tensors: Any) -> None:
    owners = (
        {t._on_write for t in tensors if isinstance(t, SlicedTensor)} if isinstance(tensors, list | tuple) else set()
    )
    for tell in owners:
        if tell is not None:
            tell()
