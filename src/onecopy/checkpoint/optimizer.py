"""An optimizer's states by parameter name: taken out for a save, and put into another optimizer.

Groups are matched by the names of their parameters, never by number: a run with other groups, or the same ones in
another order, gives each parameter the hyperparameters that it had. How the step is computed (fused, foreach, ...)
stays as the optimizer that loads was built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.checkpoint.names import Named, name_groups
from onecopy.errors import CheckpointError
from onecopy.sharding.tensor.resting import RestingTensor
from onecopy.sharding.tensor.sliced import SlicedTensor

States = dict[str, dict[str, Any]]
"""By parameter and by the state's own name."""

IMPLEMENTATION: Final = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a group that say how a step is computed, and not what it computes."""


def take_states(optimizer: Optimizer, named: Named) -> tuple[States, dict[str, Any]]:
    """The states of an optimizer.

    Returns:
        States that are tensors of a parameter's shape, for the checkpoint's tensor files; and the rest, small and the
        same on every rank: counters, numbers and each group's hyperparameters.
    """
    names = name_groups(optimizer, named)
    tensors: States = {}
    small: States = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                kind = tensors if _is_large(key, value, parameter) else small
                kind.setdefault(name, {})[key] = value
    groups = [
        {"names": group_names, "values": _hyperparameters(group)}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "states": small}


def make_states(optimizer: Optimizer, named: Named, saved: Mapping[tuple[str, str], Any]) -> States:
    """Tensors for the states to be read into, cut as this run cuts their parameters: those that are there, or new ones.

    Args:
        saved: the checkpoint's metadata of each state tensor, by names of parameter and state.
    """
    made: States = {}
    held = {name for names in name_groups(optimizer, named) for name in names}
    for (name, key), metadata in saved.items():
        if name in held:
            parameter = named.parameters[name]
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
    if rest["kind"] not in (None, type(optimizer).__name__):
        raise CheckpointError(
            f"the checkpoint has the states of {rest['kind']}, which {type(optimizer).__name__} cannot continue; pass "
            f"such an optimizer, or optimizer=None to load the model alone"
        )
    names = name_groups(optimizer, named)
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
            state = {**rest["states"].get(name, {}), **tensors.get(name, {})}
            if state:
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
    if isinstance(parameter, SlicedTensor):
        local = torch.empty_like(parameter.local, dtype=dtype, requires_grad=False)
        return SlicedTensor(local, parameter.slicing)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
