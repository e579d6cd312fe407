"""SlicedTensor: a tensor of a parameter's full shape that holds only this rank's slice of its elements.

Parameters are SlicedTensors whenever the model is not computing, and so are their gradients and optimizer states.
What an operation does to one is decided by `operations.py`; this file is the tensor alone.

One private torch name is used here, read in torch 2.13: `_disabled_torch_function_impl` (the documented way to say
"this subclass has no __torch_function__"). tests/house/test_private_apis.py fails clearly when it moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.errors import NeedsWholeError, UsageError
from onecopy.memory.strides import memory_order
from onecopy.sharding.tensor import checkpointable, files
from onecopy.sharding.tensor.tensor_parallel import TensorSpec


@dataclass(frozen=True)
class Slicing:
    """Which elements of which parameter a SlicedTensor holds.

    Attributes:
        name: the parameter's fully qualified name.
        shape: its full shape.
        strides: strides of the whole, dense tensor; its elements are flattened in memory order.
        start: the first element held, in the flattened parameter.
        numel: how many are held; may be 0.
        axis: the mesh axis along which the other slices lie.
        spec: of a parameter that is a DTensor; then the slice is one of this rank's local tensor.
        is_copy: another rank of the tensor axis holds these elements too, though maybe cut elsewhere, and saves them.
        is_whole: by its layout one rank holds all elements, and the others none.
    """

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    start: int
    numel: int
    axis: Axis
    spec: TensorSpec | None = None
    is_copy: bool = False
    is_whole: bool = False

    @property
    def is_owned(self) -> bool:
        """Whether this rank holds all elements of a parameter that is whole."""
        return self.is_whole and self.numel > 0

    def __deepcopy__(self, memo: object) -> Slicing:
        """Itself: it never changes, and there is one such place in the mesh."""
        return self

    @property
    def spread(self) -> tuple[Axis, ...]:
        """The mesh axes along which other elements of the same parameter lie."""
        return (self.axis, self.spec.axis) if self.spec is not None and self.spec.is_cut else (self.axis,)

    @property
    def memory_order(self) -> list[int]:
        """Dimensions from the slowest to the fastest in memory."""
        return memory_order(self.strides)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's elements of ``whole`` (full shape, any strides), 1-D."""
        if self.spec is not None:
            whole = self.spec.local(whole)
        return flatten(whole, self.strides)[self.start : self.start + self.numel]

    def matches(self, other: Slicing) -> bool:
        """Whether both hold the same elements of tensors of the same shape."""
        return self is other or (
            self.shape == other.shape
            and self.strides == other.strides
            and self.start == other.start
            and self.numel == other.numel
            and self.spec == other.spec
            and (self.axis is other.axis or (self.axis.rank, self.axis.size) == (other.axis.rank, other.axis.size))
        )


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class RuleTable(dict[Any, Rule]):
    """What each ATen operation does to SlicedTensors; `operations.py` fills it, and finds a rule at its first use."""

    find: Callable[[Any], Rule]

    def __missing__(self, func: Any) -> Rule:
        rule = self[func] = self.find(func)
        return rule


RULES = RuleTable()


class SlicedTensor(torch.Tensor):
    """A parameter with its full shape, dtype and device, that stores only this rank's slice.

    Elementwise operations, such as those of optimizers, act on the local slices. Norms and other reductions of all
    elements are taken over all ranks. Every other operation raises `NeedsWholeError`, which names the parameter: use
    `onecopy.gathered` there.

    Attributes:
        local: this rank's elements, 1-D, plain tensor; may be empty. Of the tensor's dtype (but see `narrow.py`).
        slicing: which elements these are.
    """

    local: Tensor
    slicing: Slicing
    _on_write: Callable[[], None] | None
    # What makes one whole; `single.py`, which needs this class, sets it.
    make_whole: ClassVar[Callable[[SlicedTensor], Tensor]]
    # Of a module's parameter: who runs the model (`optimizers.py`). Weak, for the engine holds the parameter.
    _engine: weakref.ref[Any] | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        slicing: Slicing,
        *,
        on_write: Callable[[], None] | None = None,
        requires_grad: bool = False,
        dtype: torch.dtype | None = None,
    ) -> SlicedTensor:
        tensor: SlicedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            slicing.shape,
            strides=slicing.strides,
            dtype=dtype or local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        tensor.local = local
        tensor.slicing = slicing
        tensor._on_write = on_write
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        return RULES[func](func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """As of any tensor. What is assigned, a slice or a whole tensor, is copied: memory stays the bucket's."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, SlicedTensor) and value.local is self.local:
            return
        found, own = ((tuple(t.shape), t.dtype, t.device) for t in (value, self))
        if found[:2] != own[:2] or not same_device(value.device, self.device):
            raise UsageError(
                f"{self.slicing.name!r} is sharded as {own} (shape, dtype, device) and cannot become {found}: change "
                f"the model before onecopy.shard, or choose the compute dtype there with precision=."
            )
        self.detach().copy_(value)

    def elements(self, start: int, numel: int) -> Tensor:
        """Some of this rank's elements, for reading."""
        return self.local[start : start + numel]

    def part(self, start: int, numel: int, slicing: Slicing) -> SlicedTensor:
        """Some of this rank's elements, which share its memory, as the slice of another tensor."""
        return SlicedTensor(self.local[start : start + numel], slicing, on_write=self._on_write)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that its elements take."""
        return self.local.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stop = self.slicing.start + self.slicing.numel
        return (
            f"{type(self).__name__}({self.slicing.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"holds=[{self.slicing.start}:{stop}] of {self.numel()})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        if isinstance(self, torch.nn.Parameter):
            files.refuse_pickle(self.slicing.name)
        copy = SlicedTensor(self.local.clone(), self.slicing)
        memo[id(self)] = copy
        return copy

    def full_tensor(self) -> Tensor:
        """A copy of the whole tensor, as that method of a DTensor makes it; every rank must call it.

        Raises:
            UsageError: if it is a gradient that has not been reduced yet.
        """
        return SlicedTensor.make_whole(self)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Needs the whole tensor, as does everything that asks for its memory.

        Raises:
            NeedsWholeError: always.
        """
        raise NeedsWholeError(
            f"numpy and lists need the whole of {self.slicing.name!r} {tuple(self.shape)}, but this rank holds only "
            f"{self.slicing.numel} elements: use it inside `with onecopy.gathered(...)`."
        )

    def share_memory_(self) -> NoReturn:
        """Its memory is a part of the bucket's.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.slicing.name!r} is a slice of a larger buffer, which cannot move to shared memory: call "
            f"share_memory() before onecopy.shard, or give other processes a copy of the whole parameter."
        )

    def tolist(self) -> NoReturn:
        """As `numpy`.

        Raises:
            NeedsWholeError: always.
        """
        self.numpy()

    def __copy__(self) -> SlicedTensor:
        return SlicedTensor(self.local, self.slicing, on_write=self._on_write)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_slice, files.reduce_slice(self)

    # --- torch.distributed.checkpoint's protocol; see `checkpointable.py`

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        return checkpointable.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        # Only loads ask: the slice is about to be written through views.
        if self._on_write is not None:
            self._on_write()
        return checkpointable.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpointable.view_box(self, checkpointable.find_piece(self, index.offset))


def rebuild_slice(
    local: Tensor,
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: int,
    numel: int,
    place: tuple[int, int],
) -> SlicedTensor:
    """The slice that `files.reduce_slice` kept; `torch.load` calls it."""
    axis: Any = files.SavedAxis(*place)
    return SlicedTensor(local, Slicing(name, torch.Size(shape), tuple(strides), start, numel, axis))


# torch.load(weights_only=True) calls no function that is not known to it.
torch.serialization.add_safe_globals([rebuild_slice])


def same_device(device: torch.device, own: torch.device) -> bool:
    """`cpu:0` is `cpu`; a device without a number is the one at hand."""
    return device.type == own.type and (device.index is None or device.index == (own.index or 0))


def flatten(whole: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements of ``whole`` in the memory order of a dense tensor with ``strides``, 1-D; a view where it can be."""
    return whole.permute(memory_order(strides)).reshape(-1)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that a dense copy of ``tensor`` keeps: its own when its elements fill their memory, else contiguous ones.

    So channels_last and transposed weights stay what they are, and expanded or strided ones become contiguous.
    """
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
