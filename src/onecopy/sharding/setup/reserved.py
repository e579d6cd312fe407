"""Reserved: room for the states that an optimizer's next step will make, on every rank before anything changes.

An optimizer makes its states while it steps, and a disk that is full in the middle would leave some units updated and
others not. So the step is tried on one small tensor for each group, which shows the names and dtypes of its states.
Only code of torch.optim is tried so: another class's step may do more than update parameters.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.comm.mesh import Mesh
from onecopy.errors import OffloadError
from onecopy.memory.store.pages import Pages
from onecopy.sharding.setup.agreement import everywhere
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.setup.owned import elements_in_memory, is_laid_whole
from onecopy.sharding.tensor.resting import RestingTensor

_TRIED: Final = (2, 3, 5, 7)
"""Sides of what a step is tried on: states of its shape are those that a parameter has element by element."""


@dataclass(frozen=True)
class _Room:
    """A page that is needed, for the state ``name`` of one bucket's parameters."""

    pages: Pages
    name: str
    dtype: torch.dtype


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step is code of torch.optim."""
    kind = type(optimizer)
    code = (kind.step, getattr(kind, "_init_group", kind.step))
    return all(function.__module__.startswith("torch.optim.") for function in code)


def reserve_states(optimizer: Optimizer, mesh: Mesh, *, has_closure: bool, sees_whole: bool) -> None:
    """Reserve the room of the states that the next step of ``optimizer`` makes of parameters on disk.

    Every rank of ``mesh`` calls it. Ranks send each other messages only if there is something to reserve, or if the
    step sees parameters whole: those that another rank owns may need room there.

    Args:
        has_closure: gradients are computed in the step, so that every parameter may have one.
        sees_whole: as `owned.sees_whole` says.

    Raises:
        OffloadError: on every rank, if one has no room. Nothing is reserved then, and no parameter was changed.
    """
    if not is_torchs_own(optimizer):
        return
    needed = _rooms_of_a_step(optimizer, has_closure=has_closure)
    if not needed and not sees_whole:
        return
    missing = [room for room in needed if not room.pages.has_state(optimizer, room.name, room.dtype)]

    def reserve() -> None:
        for room in missing:
            room.pages.state(optimizer, room.name, room.dtype)

    try:
        everywhere(reserve, mesh)
    except OffloadError:
        for room in missing:
            room.pages.drop_state(optimizer, room.name, room.dtype)
        raise


def _rooms_of_a_step(optimizer: Optimizer, *, has_closure: bool) -> list[_Room]:
    """Of all states that are not at rest: those that the step makes, and those that were loaded into memory."""
    found: dict[_Room, None] = {}
    need = need_of(optimizer)
    for group in optimizer.param_groups:
        tried: dict[tuple[torch.dtype, int], dict[str, torch.dtype]] = {}
        for parameter in group["params"]:
            pages = parameter.page.pages if isinstance(parameter, RestingTensor) else None
            is_whole = is_laid_whole(parameter, need)
            if pages is None or (is_whole and not parameter.slicing.numel):
                continue
            states = optimizer.state.get(parameter)
            if states:
                found_states = {name: elements_in_memory(value, parameter, need) for name, value in states.items()}
                makes = {name: value.dtype for name, value in found_states.items() if value is not None}
            elif has_closure or parameter.grad is not None:
                kind = parameter.dtype, max(1, parameter.dim()) if is_whole else 1
                if kind not in tried:
                    tried[kind] = _states_of_a_step(optimizer, group, *kind)
                makes = tried[kind]
            else:
                continue
            found |= dict.fromkeys(_Room(pages, name, dtype) for name, dtype in makes.items())
    return list(found)


def _states_of_a_step(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, dimensions: int
) -> dict[str, torch.dtype]:
    """Dtypes by name of the states that a step makes of a parameter of ``dtype`` and so many dimensions in ``group``.

    Nothing of one that has more dimensions than `_TRIED`: its states' room is reserved as the step makes them.
    """
    tried = torch.zeros(_TRIED[:dimensions], dtype=dtype)
    tried.grad = torch.zeros_like(tried)
    twin: Optimizer = object.__new__(type(optimizer))
    states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    twin.__dict__.update(optimizer.__dict__, state=states, param_groups=[{**group, "params": [tried]}])
    # Past the hooks, which are for steps of the user's.
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            step(twin)
    except Exception:
        # The step itself will say what is wrong.
        return {}
    found = states[tried].items()
    return {name: value.dtype for name, value in found if isinstance(value, Tensor) and value.shape == tried.shape}
