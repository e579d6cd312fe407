"""fully_shard: programs written for PyTorch's FSDP2 run over onecopy when their import names this module.

    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy      # before
    from onecopy.compat.fsdp2 import fully_shard, MixedPrecisionPolicy        # after

A call marks a module as a unit. The outermost marked module is sharded when its parameters are first asked for, which
is where an optimizer is made, or when it first computes. As in FSDP2 a marked module's class gains `FSDPModule`.
`reshard_after_forward=False` on every unit is stage 2, anything else stage 3. Under `CPUOffloadPolicy` masters,
optimizer states and gradients rest in host memory, and at stage 3 parameters too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from onecopy.errors import SettingsError, UsageError
from onecopy.integrations.redirect import through_forward
from onecopy.memory.store.offload import Offload
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.graph.tensors import Edits, replace_tensors
from onecopy.sharding.setup.api import shard
from onecopy.sharding.setup.whole import gathered
from onecopy.sharding.tensor.precision import Precision

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]

_CALL: Final = "_onecopy_fully_shard"
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass
class _Call:
    """What fully_shard was told about a module, and what its methods have begun."""

    mesh: DeviceMesh | None
    reshard: bool | None
    policy: MixedPrecisionPolicy
    offloads: bool
    ignored: frozenset[nn.Parameter]
    outer: weakref.ref[nn.Module] | None = None
    sharded: bool = False
    opened: dict[nn.Module, AbstractContextManager[Any]] = field(default_factory=dict)
    no_sync: AbstractContextManager[Any] | None = None


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """Mark a module, or each of a list of them, as a unit of the sharded model around it.

    Args:
        module: in place.
        mesh: of one axis, or of two: replicate and shard, whatever their names. None: all ranks.
        reshard_after_forward: False keeps parameters whole until the step.
        mp_policy, offload_policy: must be the same for all units of a model.
        ignored_params: parameters that stay plain.

    Returns:
        ``module``.

    Raises:
        SettingsError: for what onecopy does not do: policies and placements of one's own, resharding to fewer ranks,
            inputs that are not cast.
        UsageError: if a part of the model computed or gave its parameters away before the whole was marked.
    """
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise SettingsError(
            f"reshard_after_forward={reshard_after_forward} would reshard to fewer ranks, which onecopy does not do: "
            "pass True, or a mesh of two axes, which keeps slices within the second axis"
        )
    if shard_placement_fn is not None:
        raise SettingsError(
            "shard_placement_fn= cannot be honoured, because slices are equal runs of a unit's elements: leave it out"
        )
    if offload_policy is not None and type(offload_policy) not in (OffloadPolicy, CPUOffloadPolicy):
        raise SettingsError(
            f"offload_policy must be an OffloadPolicy or a CPUOffloadPolicy; found {type(offload_policy).__name__}. "
            "To offload to a directory, pass onecopy.Offload to onecopy.shard instead"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        raise SettingsError(
            "mp_policy has cast_forward_inputs=False, but onecopy casts the inputs of every unit to param_dtype: "
            "leave it out. If a unit needs wider inputs, cast them inside its forward"
        )
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    call = _Call(mesh, reshard_after_forward, policy, offloads, frozenset(ignored_params or ()))
    for one in module if isinstance(module, list) else [module]:
        _mark(one, call)
    return module


def _mark(module: nn.Module, call: _Call) -> None:
    for name, part in module.named_modules():
        if find_engine(part) is not None:
            raise UsageError(
                f"{name or type(module).__name__!r} is sharded already. That happens when it first computes, or when "
                "its parameters are first asked for: call fully_shard on all modules before that, the whole model "
                "last"
            )
    own = _Call(call.mesh, call.reshard, call.policy, call.offloads, call.ignored)
    module.__dict__[_CALL] = own
    for part in module.modules():
        inner = part.__dict__.get(_CALL)
        if inner is not None and inner is not own and inner.outer is None:
            inner.outer = weakref.ref(module)
    if not isinstance(module, FSDPModule):
        kind = type(module)
        if kind not in _classes:
            _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        module.__class__ = _classes[kind]
    if call.policy.output_dtype is not None:
        module.register_forward_hook(_cast_output)


def _cast_output(module: nn.Module, args: Any, output: Any) -> Any:
    dtype = module.__dict__[_CALL].policy.output_dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return replace_tensors(output, cast, Edits())


def _sharded(module: nn.Module) -> nn.Module:
    """The outermost marked module around ``module``, sharded now if it was not."""
    root = module
    while (outer := root.__dict__[_CALL].outer) is not None and (found := outer()) is not None:
        root = found
    own: _Call = root.__dict__[_CALL]
    if not own.sharded:
        # From here on, for sharding asks the model for its parameters.
        own.sharded = True
        try:
            _shard(root)
        except BaseException:
            own.sharded = False
            raise
    return root


def _shard(root: nn.Module) -> None:
    own: _Call = root.__dict__[_CALL]
    inner = [part for part in root.modules() if part is not root and _CALL in part.__dict__]
    calls = [part.__dict__[_CALL] for part in inner]
    for call in calls:
        if _dtypes(call.policy) != _dtypes(own.policy):
            raise SettingsError(
                f"all units of a model must have the same mp_policy; found {call.policy} and {own.policy}"
            )
        if call.offloads != own.offloads:
            raise SettingsError(
                "all units of a model must have the same offload_policy; found one with and one without it"
            )
        if call.mesh != own.mesh:
            raise SettingsError(f"all units of a model must have the same mesh; found {call.mesh} and {own.mesh}")
    kept = all(call.reshard is False for call in calls or [own])
    # Asking a marked module for its parameters would come back here.
    parameters = [parameter for _, parameter in nn.Module.named_parameters(root)]
    _move(root, own.mesh, parameters)
    ignored = frozenset().union(*(call.ignored for call in [own, *calls]))
    masters = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    precision = Precision(
        compute=own.policy.param_dtype,
        reduce=own.policy.reduce_dtype,
        # FSDP2 keeps parameters in the dtype that they have.
        master=masters.pop() if len(masters) == 1 else None,
    )
    shard(
        root,
        stage=2 if kept else 3,
        mesh=_named(own.mesh),
        units=inner or "auto",
        precision=precision,
        offload=Offload("cpu", None if kept else "cpu") if own.offloads else None,
        ignored=list(ignored),
    )


def _dtypes(policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
    return policy.param_dtype, policy.reduce_dtype


def _move(root: nn.Module, mesh: DeviceMesh | None, parameters: Iterable[Tensor]) -> None:
    """FSDP2 moves what lies on the host to the device that it trains on."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = mesh.device_type if mesh is not None else accelerator.type if accelerator is not None else "cpu"
    if kind != "cpu" and all(parameter.device.type == "cpu" for parameter in parameters):
        root.to(torch.device(kind, torch.accelerator.current_device_index()))


def _named(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The same mesh with axes of onecopy's names."""
    if mesh is None:
        return None
    if mesh.ndim > 2:
        raise SettingsError(f"mesh must have one axis, or two axes (replicate and shard); found {mesh.ndim} axes")
    names = ("shard",) if mesh.ndim == 1 else ("replicate", "shard")
    if mesh.mesh_dim_names == names:
        return mesh
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=names)
    groups = [mesh.get_group(place) for place in range(2)]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)


def _close(root: nn.Module, within: nn.Module) -> None:
    """End what `unshard` has begun in a module of ``root`` and in all inside it."""
    opened = root.__dict__[_CALL].opened
    for part in within.modules() if opened else ():
        if (whole := opened.pop(part, None)) is not None:
            whole.__exit__(None, None, None)


class UnshardHandle:
    """What `unshard(async_op=True)` returns; parameters are whole already."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class FSDPModule(nn.Module):
    """What fully_shard adds to a module's class.

    Hints about time and memory (prefetching, when to reshard, which backward is the last) are taken and change nothing:
    units are prefetched in the order that was seen, and results do not depend on them.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A slice of a Sequential makes a new module of the class, which is none of the marked ones.
        plain = next(kind for kind, marked in _classes.items() if marked is cls)
        return plain(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = _sharded(self)
        if root is self and torch.is_grad_enabled():
            # unshard() gathers ahead of a forward, which gathers for itself here.
            _close(root, root)
        return super().__call__(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        _sharded(self)
        return super().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        _sharded(self)
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("destination") is None:
            _sharded(self)
        return super().state_dict(*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backward is the last one of a step; stages 2 and 3 send gradients in every one."""
        root = _sharded(self)
        own = root.__dict__[_CALL]
        if not requires_gradient_sync and own.no_sync is None:
            own.no_sync = root.no_sync()  # type: ignore[operator]
            own.no_sync.__enter__()
        elif requires_gradient_sync and own.no_sync is not None:
            no_sync, own.no_sync = own.no_sync, None
            no_sync.__exit__(None, None, None)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make the module's parameters whole until `reshard`, or until the model's next forward for training."""
        root = _sharded(self)
        opened = root.__dict__[_CALL].opened
        if not any(self in {*outer.modules()} for outer in opened):
            _close(root, self)
            whole = opened[self] = gathered(self)
            whole.__enter__()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Let whole parameters go. That something was written into them is an error, since it would be lost."""
        _close(_sharded(self), self)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Not offered.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "gradients are averaged over ranks and cannot be divided by another factor: multiply the loss by the "
            "number of ranks over the factor"
        )

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """A hint."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """A hint: gradients are reduced over replicas in every backward, or once if none of them is the last."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """A hint; `fully_shard(reshard_after_forward=)` decides."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """A hint."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """A hint."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """A hint."""

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """A hint."""


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a marked module run as its forward does, with its parameters whole."""
    method = getattr(module, method_name)
    if not isinstance(module, FSDPModule):
        return

    @wraps(method)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return through_forward(module, method, *args, **kwargs)

    module.__dict__[method_name] = redirected
