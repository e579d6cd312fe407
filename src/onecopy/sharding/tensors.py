"""Finding and replacing tensors in whatever a module's forward takes and returns.

Tuples, named tuples, lists, dicts, dataclasses and other objects with attributes are looked into; all else is left.
Both walks run at every forward of every unit, so they are plain recursion, without generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

_MAX_DEPTH: Final = 8
_OPAQUE: Final = (str, bytes, int, float, bool, type(None), torch.nn.Module, torch.dtype, torch.device)
_SEQUENCES: Final = (tuple, list)
_COLLECTIONS: Final = (tuple, list, set, frozenset)


def find_tensors(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, to a depth of 8 containers. A tensor held twice is found twice."""
    found: list[Tensor] = []
    _find(value, found, 0)
    return found


def _find(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif depth > _MAX_DEPTH:
        return
    elif isinstance(value, _COLLECTIONS):
        for item in value:
            _find(item, found, depth + 1)
    elif isinstance(value, _OPAQUE):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _find(item, found, depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for item in vars(value).values():
            _find(item, found, depth + 1)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """``value`` with ``change`` applied to every tensor in tuples, lists, dicts and dataclasses.

    Containers in which nothing changed are returned as they are; others are copied, never edited. Tensors inside
    objects of other kinds are left: they cannot be rebuilt safely.
    """
    if isinstance(value, Tensor):
        return change(value)
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, _SEQUENCES):
        replaced = [replace_tensors(item, change, depth + 1) for item in value]
        if all(map(is_, replaced, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*replaced)
        return type(value)(replaced)
    if isinstance(value, dict):
        items = {key: replace_tensors(item, change, depth + 1) for key, item in value.items()}
        if all(map(is_, items.values(), value.values())):
            return value
        copy = value.copy()
        copy.update(items)
        return copy
    if isinstance(value, _OPAQUE):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: replace_tensors(item, change, depth + 1) for name, item in fields.items()}
        if all(map(is_, changed.values(), fields.values())):
            return value
        return dataclasses.replace(value, **changed)
    return value
