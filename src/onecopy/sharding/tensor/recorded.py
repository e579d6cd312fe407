"""Gradients of reductions: a penalty in the loss trains as in one process.

Every rank's loss has a gradient of its own, and training wants the mean over ranks, as of every gradient. Of a
reduction that is one number: the mean over ranks of the gradient of its value. So a value that autograd records is a
`Recorded`, which at its first use has that number averaged in backward, and handed to autograd as a
`ReductionGradient`: one that expands to a slice, not to a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis, Mesh
from onecopy.sharding.tensor.norms import PartialNorm
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing

aten = torch.ops.aten

_MESHES: WeakKeyDictionary[Axis, tuple[tuple[Axis, ...], Axis]] = WeakKeyDictionary()


def remember_mesh(mesh: Mesh) -> None:
    """Know ``mesh`` again by its shard axis, which is all that a slice knows of it."""
    # Not the mesh itself, which holds the key.
    _MESHES[mesh.shard] = (mesh.replicate, mesh.tensor)


def mesh_of(slicing: Slicing) -> Mesh:
    """The mesh over which a slice's model is sharded."""
    replicate, tensor = _MESHES[slicing.axis]
    return Mesh(slicing.axis, replicate, tensor)


def record(value: Tensor, source: SlicedTensor) -> Tensor:
    """``value``, a reduction of ``source``; made into a `Recorded` if autograd records it."""
    if not is_recorded(source):
        return value
    return Recorded(value.resolve() if isinstance(value, PartialNorm) else value, source.slicing)


def is_recorded(source: SlicedTensor) -> bool:
    """Whether autograd records what is done to ``source``."""
    return source.requires_grad and torch.is_grad_enabled()


class Recorded(torch.Tensor):
    """The value of a reduction that autograd records. Any use of it is one of ``value``, a plain tensor.

    Its own dispatch is the first moment at which autograd's node is known, and any use of the value comes through it.
    """

    value: Tensor
    slicing: Slicing
    _watched: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor, slicing: Slicing) -> Recorded:
        tensor: Recorded = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        tensor.value = value
        tensor.slicing = slicing
        tensor._watched = False
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        return func(*[_value_of(a) for a in args], **{name: _value_of(value) for name, value in (kwargs or {}).items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.value!r}"

    def watch(self) -> None:
        """Have the gradient averaged when it comes."""
        if self.grad_fn is not None and not self._watched:
            self._watched = True
            self.grad_fn.register_prehook(partial(_average_gradient, self.slicing, self.output_nr))


def _value_of(argument: Any) -> Any:
    if isinstance(argument, Recorded):
        argument.watch()
        return argument.value
    if isinstance(argument, list | tuple):
        return [_value_of(item) for item in argument]
    return argument


def _average_gradient(slicing: Slicing, position: int, gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    gradient = gradients[position]
    if gradient is None:
        return gradients
    mean = gradient.double().reshape(1)
    for axis in mesh_of(slicing).axes:
        if collective := axis.combine(mean, "norm"):
            collective.finish()
            mean = mean / axis.size
    averaged = ReductionGradient(mean.to(gradient.dtype).reshape(gradient.shape), slicing)
    return (*gradients[:position], averaged, *gradients[position + 1 :])


_KEEPS_ONE_VALUE = (
    aten.unsqueeze.default,
    aten.view.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten.detach.default,
)


class ReductionGradient(torch.Tensor):
    """The gradient of a reduction's value: one number, which expands to the slice of a gradient."""

    value: Tensor
    slicing: Slicing

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor, slicing: Slicing) -> ReductionGradient:
        tensor: ReductionGradient = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device
        )
        tensor.value = value
        tensor.slicing = slicing
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        first = args[0]
        if func in _KEEPS_ONE_VALUE:
            return ReductionGradient(func(first.value, *args[1:]), first.slicing)
        if func is aten.expand.default and torch.Size(args[1]) == first.slicing.shape:
            # Memory of its own, for it may become the gradient of a parameter.
            return SlicedTensor(first.value.reshape(1).repeat(first.slicing.numel), first.slicing)
        return func(*[a.value if isinstance(a, ReductionGradient) else a for a in args], **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReductionGradient({self.value!r} of {self.slicing.name!r})"
