"""State dicts as torch.distributed.checkpoint.state_dict asks for them: whole out of slices, and into a meta model.

`get_model_state_dict(full_state_dict=True)` makes DTensors whole and leaves every other tensor as it is. It calls
`state_dict()` of the module, and of the optimizer, whose public hooks end here; whether it wants whole tensors is told
by the frame that asks. Loading needs less: whole tensors are cut where they are copied, and the assignment to which
torch resorts for a meta model becomes memory and a copy.

Private torch names, read in torch 2.13: the functions `_get_model_state_dict` and `_get_optim_state_dict` of that
module and their argument `info`. tests/house/test_private_apis.py fails clearly when they move.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from onecopy.comm.mesh import Axis
from onecopy.errors import UsageError
from onecopy.sharding.model.structure import whole_model_of
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.setup.owned import as_whole, is_laid_whole
from onecopy.sharding.setup.whole import allocate
from onecopy.sharding.tensor.single import gather_slices
from onecopy.sharding.tensor.sliced import SlicedTensor

_MODULE = "torch.distributed.checkpoint.state_dict"
_FOLLOWED = "_onecopy_state_dict_followed"
_hooked = False


def follow_state_dicts(model: nn.Module) -> None:
    """Answer torch.distributed.checkpoint about the sharded ``model``, and about optimizers that have stepped it."""
    global _hooked
    model.register_state_dict_post_hook(_model_asked)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_before_load)
    if not _hooked:
        register_optimizer_step_pre_hook(_follow_optimizer)
        _hooked = True


def _follow_optimizer(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not hasattr(optimizer, _FOLLOWED) and any(
        isinstance(parameter, SlicedTensor) for group in optimizer.param_groups for parameter in group["params"]
    ):
        setattr(optimizer, _FOLLOWED, True)
        optimizer.register_state_dict_post_hook(_optimizer_asked)


def _asked_for_whole(function: str) -> Any:
    """The settings of torch's ``function`` if it is waiting for this state dict and wants whole tensors, else None."""
    if _MODULE not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == _MODULE:
            info = frame.f_locals.get("info")
            return info if getattr(info, "full_state_dict", False) else None
        frame = frame.f_back
    return None


def _model_asked(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    info = _asked_for_whole("_get_model_state_dict")
    if info is None:
        return
    whole: dict[int, Any] = {}
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, SlicedTensor):
            # A tied parameter has several names and one slicing.
            if id(value.slicing) not in whole:
                whole[id(value.slicing)] = _whole(value, info)
            state_dict[name] = whole[id(value.slicing)]


def _optimizer_asked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    info = _asked_for_whole("_get_optim_state_dict")
    if info is None:
        return None
    need = need_of(optimizer)
    found: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    owned = {number: p.slicing.axis for number, p in enumerate(found) if is_laid_whole(p, need)}

    def make_whole(number: Any, value: Any) -> Any:
        if not isinstance(value, SlicedTensor):
            return value
        # Of a parameter that lies whole, this rank alone has states, in a file or as they were loaded.
        return as_whole(value.local, value) if number in owned else _whole(value, info)

    states = {
        number: {name: make_whole(number, value) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": _with_other_owners(states, owned)}


def _with_other_owners(states: dict[Any, Any], numbers: dict[int, Axis]) -> dict[Any, Any]:
    """The states by number of parameter, those of parameters that other ranks own among them.

    Args:
        numbers: of parameters that lie whole on one rank, and the axis along which the other ranks are.
    """
    for axis in dict.fromkeys(numbers.values()):
        own = {number: states[number] for number, along in numbers.items() if along is axis and number in states}
        for others in axis.exchange_objects(_on_cpu(own)):
            states |= {number: value for number, value in others.items() if number not in states}
    return dict(sorted(states.items())) if numbers else states


def _on_cpu(value: Any) -> Any:
    """Tensors in nested values as they can be sent to anybody."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def _whole(value: SlicedTensor, info: Any) -> Tensor:
    whole = gather_slices(value)
    if not info.cpu_offload:
        return whole
    # torch keeps those of the first rank alone; the others' memory goes at once.
    return whole.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else value


def _before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: object
) -> None:
    if not local_metadata.get("assign_to_params_buffers"):
        return
    # Assigned tensors would stand beside the slices that the engine knows.
    local_metadata["assign_to_params_buffers"] = False
    parameters = list(module.parameters())
    if not parameters or not all(isinstance(p, SlicedTensor) and p.is_meta for p in parameters):
        return
    given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    device = next((v.device for v in given.values() if isinstance(v, Tensor) and not v.is_meta), None)
    if device is None:
        return
    root = whole_model_of(module)
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    has = {id(tensor) for name, tensor in own if name in given}
    if without := [name for name, p in root.named_parameters() if id(p) not in has]:
        raise UsageError(
            f"parameter {without[0]!r} of the meta model is not in the state dict and would have no values: give "
            f"load_state_dict(assign=True) all of the model's parameters at once, or call "
            f"onecopy.materialize(model) first, which initialises it."
        )
    missing = [name for name, buffer in root.named_buffers() if buffer.is_meta and id(buffer) not in has]
    if missing:
        raise UsageError(
            f"buffer {missing[0]!r} of the meta model is not in the state dict and would have no values: call "
            f"onecopy.materialize(model) first, which computes it."
        )
    allocate(module, device)
