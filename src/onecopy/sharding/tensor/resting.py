"""RestingTensor: a SlicedTensor whose elements rest in a page of a file while nobody uses them.

An operation brings them: those of one tensor, or of a list some rows at a time, so that no more than `_GROUP_BYTES` of
a list are in memory at once. What it wrote goes back before it returns. While an optimizer steps, whole pages are at
hand (`setup/paged.py`), and operations act on these as they do on any slice.

`local` of a tensor at rest is a copy, for reading. Whoever writes to a slice does it by an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from onecopy.memory.arena import Region
from onecopy.memory.store.pages import Page
from onecopy.sharding.tensor import checkpointable
from onecopy.sharding.tensor.arriving import ArrivingBox
from onecopy.sharding.tensor.lists import await_scale, combine_overflow
from onecopy.sharding.tensor.narrow import gradient_slice, written_elements
from onecopy.sharding.tensor.pending import PendingGradient
from onecopy.sharding.tensor.sliced import RULES, SlicedTensor, Slicing

aten = torch.ops.aten

_GROUP_BYTES: Final = 16 * 2**20
_ALIASES: Final = (aten.detach.default, aten.alias.default)
_UNSCALE: Final = aten._amp_foreach_non_finite_check_and_unscale_.default
_NORMS: Final = aten._foreach_norm.Scalar
_FILLED_LIKE: Final[dict[Any, Callable[[Tensor, Any], object]]] = {
    aten.zeros_like.default: lambda made, _: made.zero_(),
    aten.ones_like.default: lambda made, _: made.fill_(1),
    aten.full_like.default: lambda made, args: made.fill_(args[1]),
    aten.empty_like.default: lambda made, _: made,
    aten.clone.default: lambda made, args: made.copy_(args[0].local),
}
"""How optimizers make states."""


class RestingTensor(SlicedTensor):
    """See the file's first lines.

    Attributes:
        page: where the elements rest.
        start: the first of them in the page.
    """

    page: Page
    start: int
    _is_loaded = False

    @staticmethod
    def __new__(
        cls,
        page: Page,
        start: int,
        slicing: Slicing,
        *,
        on_write: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> RestingTensor:
        tensor: RestingTensor = torch.Tensor._make_wrapper_subclass(
            cls, slicing.shape, strides=slicing.strides, dtype=dtype or page.dtype, device=torch.device("cpu")
        )
        tensor.page = page
        tensor.start = start
        tensor.slicing = slicing
        tensor._on_write = on_write
        return tensor

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's elements: those at hand, or a copy of what rests."""
        whole, numel = self.page.at_hand, self.slicing.numel
        return self.page.read(self.start, numel) if whole is None else whole[self.start : self.start + numel]

    def elements(self, start: int, numel: int) -> Tensor:
        return self.page.read(self.start + start, numel)

    @property
    def held_bytes(self) -> int:
        return 0

    def part(self, start: int, numel: int, slicing: Slicing) -> RestingTensor:
        return RestingTensor(self.page, self.start + start, slicing, on_write=self._on_write, dtype=self.dtype)

    def alias(self) -> RestingTensor:
        """Another tensor of the same elements."""
        return self.part(0, self.slicing.numel, self.slicing)

    def __copy__(self) -> RestingTensor:
        return self.alias()

    def __create_write_items__(self, fqn: str, info: object) -> list[Any]:
        self._is_loaded = False
        return super().__create_write_items__(fqn, info)

    def __create_chunk_list__(self) -> list[Any]:
        self._is_loaded = True
        return super().__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        piece = checkpointable.find_piece(self, index.offset)
        if not self._is_loaded:
            return checkpointable.view_box(self, piece)
        start = checkpointable.first_element(self.slicing, piece)
        run = self.elements(start, piece.run.numel)
        box = checkpointable.shape_run(run, self.slicing, piece)
        return ArrivingBox(box, lambda: self.page.write(self.start + start, run))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if PendingGradient in types:
            return NotImplemented
        if func in _ALIASES:
            return args[0].alias()
        if func in _FILLED_LIKE and (made := _made_in_nursery(func, args, kwargs)) is not None:
            return made
        resting = list(_resting(args, kwargs))
        if all(t.page.at_hand is not None and t.dtype == t.page.dtype for t in resting):
            result = RULES[func](func, args, kwargs)
            _mark_changed(_written_tensors(func, args, kwargs))
            return result
        if func is _NORMS:
            return RULES[func](func, args, kwargs)
        if any(_is_column(argument) for argument in args):
            return _in_groups(func, args, kwargs)
        if not func._schema.is_mutable and all(t.dtype == t.page.dtype for t in resting):
            return RULES[func](func, args, kwargs)
        with_stand_ins = _Brought(resting)
        result = func(*map(with_stand_ins, args), **{name: with_stand_ins(value) for name, value in kwargs.items()})
        with_stand_ins.put_back(_written_tensors(func, args, kwargs))
        return with_stand_ins.originals(result)


class _Brought:
    """Stand-ins in memory for tensors that rest; called with one of these it gives that one's."""

    def __init__(self, resting: Sequence[RestingTensor]) -> None:
        self._stand_ins: dict[int, SlicedTensor] = {}
        self._originals: dict[int, RestingTensor] = {}
        under_way = []
        for tensor in resting:
            if id(tensor) in self._stand_ins:
                continue
            page, numel = tensor.page, tensor.slicing.numel
            if page.at_hand is None:
                local = torch.empty(numel, dtype=page.dtype)
                under_way.append(page.begin_read(tensor.start, local))
            else:
                local = tensor.local
            stand_in = gradient_slice(local, tensor.slicing, tensor.dtype)
            stand_in._on_write = tensor._on_write
            self._stand_ins[id(tensor)] = stand_in
            self._originals[id(stand_in)] = tensor
        for transfer in under_way:
            transfer.wait()

    def __call__(self, argument: Any) -> Any:
        return self._stand_ins.get(id(argument), argument)

    def originals(self, result: Any) -> Any:
        """``result`` with the tensors that rest in their stand-ins' place."""
        if isinstance(result, list | tuple):
            return type(result)(self.originals(item) for item in result)
        return self._originals.get(id(result), result)

    def put_back(self, written: Iterable[RestingTensor]) -> None:
        """Write what an operation changed to where it rests."""
        under_way = []
        for tensor in {id(t): t for t in written}.values():
            if tensor.page.at_hand is None:
                under_way.append(tensor.page.begin_write(tensor.start, self._stand_ins[id(tensor)].local))
            else:
                tensor.page.is_changed = True
        for transfer in under_way:
            transfer.wait()


def _is_column(argument: Any) -> bool:
    """Whether it is a list of tensors, and not one of sizes."""
    return isinstance(argument, list | tuple) and any(isinstance(item, Tensor) for item in argument)


def _in_groups(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Act on some rows of an operation's lists after the other."""
    num_rows = next(len(argument) for argument in args if _is_column(argument))
    results: list[Any] = []
    if func is _UNSCALE:
        await_scale(args[1])
    for rows in _groups(num_rows, args, kwargs):

        def take(argument: Any, rows: range = rows) -> Any:
            is_column = isinstance(argument, list | tuple) and len(argument) == num_rows
            return [argument[row] for row in rows] if is_column else argument

        columns, by_name = [take(a) for a in args], {name: take(value) for name, value in kwargs.items()}
        brought = _Brought(list(_resting(columns, by_name)))

        def stand_in(column: Any, brought: _Brought = brought) -> Any:
            if not isinstance(column, list):
                return brought(column)
            found = [brought(item) for item in column]
            # The rule sends a message, and ranks may have other groups.
            return [item.local for item in found] if func is _UNSCALE else found

        result = func(*map(stand_in, columns), **{name: stand_in(value) for name, value in by_name.items()})
        brought.put_back(_written_tensors(func, columns, by_name))
        results += result if isinstance(result, list | tuple) else ()
    if func is _UNSCALE:
        combine_overflow(args[0], args[1])
    return None if func._schema.is_mutable else results


def _groups(num_rows: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[range]:
    """Rows of at most `_GROUP_BYTES` together, at least one."""
    columns = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and len(a) == num_rows]
    first, nbytes = 0, 0
    for row in range(num_rows):
        own = sum(c[row].slicing.numel * c[row].page.dtype.itemsize for c in columns if _rests(c[row]))
        if nbytes and nbytes + own > _GROUP_BYTES:
            yield range(first, row)
            first, nbytes = row, 0
        nbytes += own
    yield range(first, num_rows)


def _rests(item: Any) -> bool:
    return isinstance(item, RestingTensor)


def _resting(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[RestingTensor]:
    for argument in (*args, *kwargs.values()):
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, RestingTensor):
                yield item


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[RestingTensor]:
    """What rests among the arguments that the operation writes to."""
    if not func._schema.is_mutable:
        return []
    names = [argument.name for argument in func._schema.arguments]
    written = [
        args[position] if position < len(args) else kwargs.get(names[position])
        for position in written_elements(func, kwargs)
    ]
    return list(_resting(written, {}))


def _mark_changed(written: Iterable[RestingTensor]) -> None:
    for tensor in written:
        tensor.page.is_changed = True


def _made_in_nursery(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor | None:
    """A new slice where states are made in an optimizer's first step; None at other times.

    A heap from which states of every bucket are taken, and to which they are given back in another order than they
    came, grows by a part of each. A region does not.
    """
    source = args[0]
    nursery: Region | None = source.page.pages.nursery if _rests(source) and source.page.pages is not None else None
    if nursery is None or kwargs.get("device", source.device) != source.device:
        return None
    dtype = kwargs.get("dtype") or source.dtype
    made = SlicedTensor(nursery.empty(source.slicing.numel, dtype), source.slicing)
    _FILLED_LIKE[func](made.local, args)
    return made
