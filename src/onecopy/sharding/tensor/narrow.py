"""NarrowGradient: a gradient slice that is declared in its parameter's dtype and holds its elements in a narrower one.

ZeRO §3.1 counts 2 bytes for a gradient beside a master of 4. torch ties a gradient's dtype to its parameter's, and its
fused optimizers want them equal. So the dtype shown is the master's, and every operation is one on that dtype:

- One that writes, to the gradient or with it, is done in pieces: at most `PIECE_NUMEL` elements are wide at a time,
  however many tensors a call takes, and what was written to the gradient is rounded back.
- One that returns something new takes the gradient widened, and what it returns is wide: optimizer states are.
- Norms (`norms.py`) and GradScaler's unscaling take the narrow elements as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from onecopy.errors import NeedsWholeError
from onecopy.sharding.tensor.elements import first_sliced, needs_whole, operation_name, writes_out, written
from onecopy.sharding.tensor.pending import PendingGradient
from onecopy.sharding.tensor.precision import PIECE_NUMEL
from onecopy.sharding.tensor.sliced import RULES, SlicedTensor, Slicing

aten = torch.ops.aten

_ALIASES: Final = (aten.detach.default, aten.alias.default)
_ON_NARROW: Final = (
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten._foreach_norm.Scalar,
    aten._amp_foreach_non_finite_check_and_unscale_.default,
)
_WHOLE: Final = slice(None)

Rows = list[tuple[int, slice]]
"""Which tensors of an operation's lists, and which of their local elements."""


def gradient_slice(local: Tensor, slicing: Slicing, dtype: torch.dtype) -> SlicedTensor:
    """The gradient of a sliced parameter of ``dtype``, over this rank's elements ``local`` (1-D) in whatever dtype."""
    return SlicedTensor(local, slicing) if local.dtype == dtype else NarrowGradient(local, slicing, dtype=dtype)


class NarrowGradient(SlicedTensor):
    """See the file's first lines. ``local`` is of a narrower dtype than the tensor's own."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if PendingGradient in types:
            return NotImplemented
        if func in _ALIASES:
            return cls(args[0].local, args[0].slicing, dtype=args[0].dtype)
        if func in _ON_NARROW:
            return RULES[func](func, args, kwargs)
        return _in_groups(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        copy = memo[id(self)] = NarrowGradient(self.local.clone(), self.slicing, dtype=self.dtype)
        return copy


def _in_groups(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Act on one group of rows after the other."""
    if any(isinstance(value, Tensor | list | tuple) for value in kwargs.values()) and writes_out(func):
        found = first_sliced(args, kwargs)
        raise NeedsWholeError(
            f"{operation_name(func)} cannot write to out= for the gradient of {found.slicing.name!r}, because its "
            f"elements are held in {found.local.dtype}: leave out= away, or use p.grad.clone()."
        )
    in_place, in_lists = func._schema.is_mutable, any(isinstance(argument, list | tuple) for argument in args)
    columns = args if in_lists else tuple([argument] for argument in args)
    if in_lists and not isinstance(args[0], list | tuple):
        needs_whole(func, args, kwargs)
    numels = _narrow_numels(columns)
    room = _Room(min(PIECE_NUMEL, sum(numels)))
    results: list[Any] = []
    for rows in _groups(numels, cut=in_place):
        results += _Group(rows, room).act(func, columns, kwargs, in_lists)
    if in_place:
        return args[0] if func._schema.returns else None
    return results if in_lists else results[0]


def _narrow_numels(columns: Sequence[Any]) -> list[int]:
    """For each row the elements to be widened, 0 where nothing is narrow."""
    numels = [0] * len(columns[0])
    for column in columns:
        if isinstance(column, list | tuple):
            for index, item in enumerate(column):
                if isinstance(item, NarrowGradient):
                    numels[index] = item.local.numel()
    return numels


def _groups(numels: Sequence[int], *, cut: bool) -> Iterator[Rows]:
    """Rows of at most `PIECE_NUMEL` elements together; larger ones are groups alone, in pieces if they may be cut."""
    rows: Rows = []
    room = PIECE_NUMEL
    for index, numel in enumerate(numels):
        if rows and numel > room:
            yield rows
            rows, room = [], PIECE_NUMEL
        run, left = _WHOLE, numel
        while cut and left > PIECE_NUMEL:
            start = numel - left
            yield [(index, slice(start, start + PIECE_NUMEL))]
            left -= PIECE_NUMEL
            run = slice(start + PIECE_NUMEL, numel)
        rows.append((index, run))
        room -= left
    yield rows


class _Room:
    """Memory for ``numel`` wide elements, the same for all groups of a call. What does not fit has its own."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._memory: Tensor | None = None
        self._taken = 0

    def clear(self) -> None:
        self._taken = 0

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Undefined elements, as many as ``like`` has and on its device."""
        if self._memory is None:
            self._memory = torch.empty(self._numel, dtype=dtype, device=like.device)
        memory = self._memory[self._taken : self._taken + like.numel()]
        if (memory.numel(), memory.dtype, memory.device) != (like.numel(), dtype, like.device):
            return torch.empty_like(like, dtype=dtype)
        self._taken += like.numel()
        return memory


class _Group:
    """Some rows of an operation's arguments. A gradient that it takes twice is widened once."""

    def __init__(self, rows: Rows, room: _Room) -> None:
        self._rows = rows
        self._room = room
        room.clear()
        self._widened: dict[int, tuple[Tensor, Tensor]] = {}

    def act(self, func: Any, columns: Sequence[Any], kwargs: dict[str, Any], in_lists: bool) -> list[Any]:
        """Widen, act, and round back what was written to gradients. Returns results that are new."""
        pieces = [self._take(column) for column in columns]
        if self._widened:
            narrow, wide = zip(*self._widened.values(), strict=True)
            torch._foreach_copy_(wide, narrow)
        result = RULES[func](func, tuple(pieces if in_lists else [piece[0] for piece in pieces]), kwargs)
        changed = [
            self._widened[id(column[index])]
            for column in (columns[position] for position in written_elements(func, kwargs))
            for index, _ in (self._rows if column else ())
            if isinstance(column[index], NarrowGradient)
        ]
        if changed:
            narrow, wide = zip(*changed, strict=True)
            torch._foreach_copy_(narrow, wide)
        if func._schema.is_mutable:
            return []
        return list(result) if in_lists else [result]

    def _take(self, column: Any) -> Any:
        """The rows of an argument; one that is no list, or an empty one, serves all rows."""
        if not isinstance(column, list | tuple) or not column:
            return column
        return [self._piece(column[index], run) for index, run in self._rows]

    def _piece(self, item: Any, run: slice) -> Any:
        if not isinstance(item, SlicedTensor) or (run == _WHOLE and not isinstance(item, NarrowGradient)):
            return item
        local, slicing = item.local[run], item.slicing
        if isinstance(item, NarrowGradient):
            if id(item) not in self._widened:
                self._widened[id(item)] = local, self._room.take(local, item.dtype)
            local = self._widened[id(item)][1]
        if run != _WHOLE:
            slicing = replace(slicing, start=slicing.start + run.start, numel=local.numel())
        return SlicedTensor(local, slicing, on_write=item._on_write)


def written_elements(func: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Where elements are written. Fused optimizers write to gradients only where they unscale them."""
    kept = kwargs.get("grad_scale") is None and func._schema.name.startswith("aten::_fused_")
    return tuple(p for p in written(func) if not (kept and func._schema.arguments[p].name == "grads"))
