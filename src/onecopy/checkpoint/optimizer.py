"""Optimizers' states by parameter name: taken out for a save, and put into other optimizers.

Groups are matched by the names of their parameters, never by number: a run with other groups, or the same ones in
another order, gives each parameter the hyperparameters that it had. How the step is computed (fused, foreach, ...)
stays as the optimizer that loads was built.

States of a parameter that lies whole on one rank are on that rank alone, and of any kind: lists of matrices too, whose
tensors are saved each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onecopy.checkpoint.names import Named, name_groups
from onecopy.errors import CheckpointError, UsageError
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.setup.owned import is_laid_whole
from onecopy.sharding.tensor.resting import RestingTensor
from onecopy.sharding.tensor.sliced import SlicedTensor

States = dict[str, dict[str, Any]]
"""By parameter and by the state's own name."""

IMPLEMENTATION: Final = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a group that say how a step is computed, and not what it computes."""


_TENSOR: Final = "onecopy tensor"
"""Stands in a list of states for a tensor that is saved by itself, under the name beside it."""


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def describe_kinds(optimizers: Sequence[Optimizer]) -> str | None:
    """The optimizers' classes, in words; None without any."""
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers) or None


def take_states(optimizers: Sequence[Optimizer], named: Named) -> tuple[States, dict[str, Any]]:
    """The states of optimizers that hold different parameters.

    Returns:
        States that are tensors of a parameter's shape, for the checkpoint's tensor files; and the rest, small and the
        same on every rank, but of parameters that lie whole on one rank: counters, numbers and each group's
        hyperparameters.

    Raises:
        UsageError: if a state is a tensor of a kind that a checkpoint does not hold.
    """
    tensors: States = {}
    small: States = {}
    groups = []
    for optimizer in optimizers:
        names = name_groups(optimizer, named)
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            for parameter, name in zip(group["params"], group_names, strict=True):
                if not _is_elsewhere(parameter, optimizer):
                    _take(optimizer, parameter, name, tensors, small)
            kind = type(optimizer).__name__
            groups.append({"names": group_names, "values": _hyperparameters(group), "kind": kind})
    only = type(optimizers[0]).__name__ if len(optimizers) == 1 else None
    return tensors, {"kind": only, "groups": groups, "states": small}


def whole_states(optimizers: Sequence[Optimizer], named: Named) -> States:
    """Of what `take_states` calls small, the states of parameters that lie whole on this rank."""
    _, rest = take_states(optimizers, named)
    holder = _holders(optimizers, named)
    return {
        name: states
        for name, states in rest["states"].items()
        if is_laid_whole(named.parameters[name], need_of(holder[name]))
    }


def _holders(optimizers: Sequence[Optimizer], named: Named) -> dict[str, Optimizer]:
    """Which of them holds a parameter, by its name."""
    return {name: one for one in optimizers for names in name_groups(one, named) for name in names}


def _take(optimizer: Optimizer, parameter: Tensor, name: str, tensors: States, small: States) -> None:
    is_whole = is_laid_whole(parameter, need_of(optimizer))
    for key, value in optimizer.state.get(parameter, {}).items():
        if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor | SlicedTensor):
            raise UsageError(
                f"state {key!r} of {name!r} is a {type(value).__name__}, which a checkpoint does not hold: save the "
                f"model with optimizer=None, and each rank's optimizer.state_dict() with torch.save"
            )
        if _is_large(key, value, parameter):
            tensors.setdefault(name, {})[key] = value
        else:
            own = tensors.setdefault(name, {})
            small.setdefault(name, {})[key] = _without_tensors(value, key, own) if is_whole else value
            if not own:
                del tensors[name]


def _without_tensors(value: Any, key: str, tensors: dict[str, Any]) -> Any:
    """A nested list of states with its tensors put into ``tensors`` by names of their own."""
    if not isinstance(value, list | tuple):
        return value
    found = []
    for number, item in enumerate(value):
        place = f"{key}[{number}]"
        if isinstance(item, Tensor) and item.numel():
            tensors[place] = item
            found.append({_TENSOR: place})
        else:
            found.append(_without_tensors(item, place, tensors))
    return found


def _with_tensors(value: Any, tensors: dict[str, Any]) -> Any:
    """As it was before `_without_tensors`, out of ``tensors``; one that is not there stays as it stands."""
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        return tensors.pop(value[_TENSOR], value)
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


def _is_elsewhere(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether another rank alone has states of it."""
    return is_laid_whole(parameter, need_of(optimizer)) and not _numel_here(parameter)


def _numel_here(parameter: Tensor) -> int:
    return parameter.slicing.numel if isinstance(parameter, SlicedTensor) else parameter.numel()


def make_states(optimizers: Sequence[Optimizer], named: Named, saved: Mapping[tuple[str, str], Any]) -> States:
    """Tensors for the states to be read into, cut as this run cuts their parameters: those that are there, or new ones.

    Args:
        saved: the checkpoint's metadata of each state tensor, by names of parameter and state.
    """
    made: States = {}
    holder = _holders(optimizers, named)
    for (name, key), metadata in saved.items():
        if name in holder and not _is_elsewhere(named.parameters[name], holder[name]):
            parameter, optimizer = named.parameters[name], holder[name]
            own = optimizer.state.get(parameter, {}).get(key)
            fits = isinstance(own, Tensor) and (own.shape, own.dtype) == (metadata.size, metadata.properties.dtype)
            new = own if fits else _new(optimizer, parameter, key, metadata.size, metadata.properties.dtype)
            made.setdefault(name, {})[key] = new
    return made


def put_states(optimizer: Optimizer, named: Named, tensors: States, rest: Mapping[str, Any]) -> None:
    """Give an optimizer what `take_states` took, of itself or of another run's.

    Raises:
        CheckpointError: if the checkpoint knows nothing of a parameter, or parameters of one group had different
            hyperparameters. Nothing is changed then.
    """
    names = name_groups(optimizer, named)
    held = {name for group in names for name in group}
    kinds = {rest["kind"], *(group.get("kind") for group in rest["groups"] if held & {*group["names"]})}
    if strange := kinds - {None, type(optimizer).__name__}:
        raise CheckpointError(
            f"the checkpoint has the states of {strange.pop()}, which {type(optimizer).__name__} cannot continue; "
            "pass an optimizer of that kind, or optimizer=None to load only the model"
        )
    group_of = {name: group["values"] for group in rest["groups"] for name in group["names"]}
    missing = [name for group in names for name in group if name not in group_of]
    if missing:
        raise CheckpointError(f"the checkpoint's optimizer does not have {', '.join(missing)}")
    groups, states, number = [], {}, 0
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        groups.append(
            {
                **group,
                **_common_values(group_names, group_of),
                "params": list(range(number, number + len(group_names))),
            }
        )
        for name in group_names:
            large = dict(tensors.get(name, {}))
            small = {key: _with_tensors(value, large) for key, value in rest["states"].get(name, {}).items()}
            state = {**small, **large}
            if state and not _is_elsewhere(named.parameters[name], optimizer):
                states[number] = state
            number += 1
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _is_large(key: str, value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or key == "step":
        return False
    return type(value) is not Tensor or value.shape == parameter.shape or value.numel() > 1


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION}


def _common_values(names: list[str], group_of: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if not names:
        return {}
    first = group_of[names[0]]
    for name in names:
        for key, value in group_of[name].items():
            if key not in first or first[key] != value:
                raise CheckpointError(
                    f"{names[0]!r} and {name!r} are in one group of this optimizer, but were saved with "
                    f"{key} = {first.get(key)!r} and {value!r}: give them groups of their own"
                )
    return first


def _new(optimizer: Optimizer, parameter: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor for the state ``key`` of ``parameter``, where such states rest."""
    if size != parameter.shape:
        return torch.empty(size, dtype=dtype, device=parameter.device)
    if isinstance(parameter, RestingTensor) and parameter.page.pages is not None:
        page = parameter.page.pages.state(optimizer, key, dtype)
        return RestingTensor(page, parameter.start, parameter.slicing)
    if is_laid_whole(parameter, need_of(optimizer)):
        return torch.empty(size, dtype=dtype, device=parameter.device)
    if isinstance(parameter, SlicedTensor):
        local = torch.empty_like(parameter.local, dtype=dtype, requires_grad=False)
        return SlicedTensor(local, parameter.slicing)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
