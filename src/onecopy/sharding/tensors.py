"""Finding and replacing tensors in whatever a module's forward takes and returns.

Tuples, named tuples, lists, dicts, dataclasses and other objects with attributes are looked into; all else is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 8
_OPAQUE = (str, bytes, int, float, bool, type(None), torch.nn.Module, torch.dtype, torch.device)


def iterate_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in ``value``, to a depth of 8 containers. A tensor held twice is found twice."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _OPAQUE) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_tensors(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from iterate_tensors(item, depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for item in vars(value).values():
            yield from iterate_tensors(item, depth + 1)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """``value`` with ``change`` applied to every tensor in tuples, lists, dicts and dataclasses.

    Containers in which nothing changed are returned as they are; others are copied, never edited. Tensors inside
    objects of other kinds are left: they cannot be rebuilt safely.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _OPAQUE) or depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        items = {key: replace_tensors(item, change, depth + 1) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        copy = value.copy()
        copy.update(items)
        return copy
    if isinstance(value, list | tuple):
        replaced = [replace_tensors(item, change, depth + 1) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*replaced)
        return type(value)(replaced)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: replace_tensors(item, change, depth + 1) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        return dataclasses.replace(value, **changed)
    return value
