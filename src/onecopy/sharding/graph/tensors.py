"""Finding and replacing tensors in whatever a module's forward takes and returns.

Tuples, named tuples, lists, dicts, dataclasses and other objects with attributes are looked into; all else is left.
Both walks run at every forward of every unit, so they are plain recursion, without generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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


class Edits:
    """What was replaced inside of a caller's own containers, to be put back when the call is over."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: list[tuple[Any, Any, Any, Any]] = []

    def make(self, container: Any, key: Any, old: Any, new: Any) -> None:
        """Put ``new`` where ``old`` is: an item of a list or dict, or an attribute of a dataclass."""
        if isinstance(container, list | dict):
            container[key] = new
        else:
            setattr(container, key, new)
        self._made.append((container, key, old, new))

    def undo(self) -> None:
        """Put back what was replaced, wherever it still is; what others have put there since stays."""
        while self._made:
            container, key, old, new = self._made.pop()
            if isinstance(container, list):
                for position, item in enumerate(container):
                    if item is new:
                        container[position] = old
            elif isinstance(container, dict):
                if container.get(key) is new:
                    container[key] = old
            elif getattr(container, key, None) is new:
                setattr(container, key, old)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor], edits: Edits | None = None, depth: int = 0) -> Any:
    """``value`` with ``change`` applied to every tensor in tuples, lists, dicts and dataclasses.

    Containers in which nothing changed are returned as they are. Others are copied, never edited; but with ``edits``
    those that can be edited are, for a module may write to a list that it is given. Tensors inside objects of other
    kinds are left: they cannot be rebuilt safely.
    """
    if isinstance(value, Tensor):
        return change(value)
    if depth > _MAX_DEPTH:
        return value
    items: list[tuple[Any, Any]]
    if isinstance(value, _SEQUENCES):
        items = list(enumerate(value))
    elif isinstance(value, dict):
        items = list(value.items())
    elif not isinstance(value, _OPAQUE) and dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    else:
        return value
    changes = [
        (key, old, new) for key, old in items if (new := replace_tensors(old, change, edits, depth + 1)) is not old
    ]
    if not changes:
        return value
    if edits is not None and _can_be_edited(value):
        for key, old, new in changes:
            edits.make(value, key, old, new)
        return value
    return _copy_with(value, items, {key: new for key, _, new in changes})


def _can_be_edited(container: Any) -> bool:
    if isinstance(container, tuple):
        return False
    return isinstance(container, list | dict) or not container.__dataclass_params__.frozen


def _copy_with(container: Any, items: list[tuple[Any, Any]], changes: dict[Any, Any]) -> Any:
    if isinstance(container, _SEQUENCES):
        values = [changes.get(position, item) for position, item in items]
        return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
    if isinstance(container, dict):
        copy = container.copy()
        for key, new in changes.items():
            copy[key] = new
        return copy
    return dataclasses.replace(container, **{**dict(items), **changes})
