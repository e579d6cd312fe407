"""Optimizers stay PyTorch's own; this file is where onecopy meets them: before they are stepped, and when remapped.

torch offers global hooks around every optimizer's step. Ours leave optimizers alone that hold no sliced parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onecopy.comm.dtensors import is_dtensor
from onecopy.errors import UsageError
from onecopy.sharding.bucket.masters import Stores
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.setup.owned import (
    end_owned_step,
    is_laid_whole,
    is_owned_step,
    owned_step,
    sees_whole,
    show_gradients,
    write_begins,
)
from onecopy.sharding.setup.paged import end_paged_step, page_step
from onecopy.sharding.setup.reserved import reserve_states
from onecopy.sharding.tensor.files import describe_difference, is_saved, refuse_pickle
from onecopy.sharding.tensor.pending import PendingGradient
from onecopy.sharding.tensor.recorded import remember_mesh
from onecopy.sharding.tensor.sliced import SlicedTensor

_REPLACED = "_onecopy_replaced"
_hooked = False


def watch(engine: Engine) -> None:
    """Have optimizers checked that hold parameters of this engine; its losses are averaged over its mesh."""
    global _hooked
    remember_mesh(engine.mesh)
    reference = weakref.ref(engine)
    for unit in engine.units:
        for bucket in unit.buckets:
            for entry in bucket.entries:
                entry.sliced._engine = reference
    for module in {engine.model, *(unit.scope for unit in engine.units)}:
        # Asked for by copy and pickle, and by torch.jit.script, before they meet hooks that say nothing to readers.
        module.__dict__["__reduce_ex__"] = partial(_refuse_pickle, type(module).__name__)
        module.__dict__["__prepare_scriptable__"] = _refuse_script
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _hooked = True


def _refuse_pickle(name: str, protocol: object) -> NoReturn:
    refuse_pickle(name)


def _refuse_script() -> NoReturn:
    raise UsageError(
        "a sharded model cannot be scripted: call torch.jit.script on the plain model, and give it the state_dict() "
        "that the sharded model has inside `with onecopy.gathered(model):`."
    )


def mark_replaced(parameter: Tensor, name: str) -> None:
    """Know a parameter again that modules no longer hold, if an optimizer still does."""
    setattr(parameter, _REPLACED, name)


def check_holds(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raise `UsageError` if the optimizer holds none of ``parameters``."""
    known = {id(parameter) for parameter in parameters}
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("optimizer= holds none of the model's parameters; pass the one made from model.parameters().")


def remap(optimizer: Optimizer, replacements: Mapping[nn.Parameter, SlicedTensor]) -> None:
    """Let an optimizer that was made before sharding hold the sliced parameters, and slices of its states.

    Args:
        replacements: from each original parameter to its slice. States of a parameter's shape are sliced, others kept;
            those of a parameter that its steps see whole on one rank stay there as they are, and nowhere else.
    """
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
    need = need_of(optimizer)
    for parameter, sliced in replacements.items():
        if parameter not in optimizer.state:
            continue
        states = optimizer.state.pop(parameter)
        if not is_laid_whole(sliced, need):
            optimizer.state[sliced] = {name: _sliced_state(value, sliced) for name, value in states.items()}
        elif sliced.slicing.numel:
            optimizer.state[sliced] = states


def _sliced_state(value: Any, parameter: SlicedTensor) -> Any:
    slicing = parameter.slicing
    if (
        isinstance(value, SlicedTensor)
        or not isinstance(value, Tensor)
        or value.shape != slicing.shape
        or not slicing.shape
    ):
        return value
    return SlicedTensor(slicing.cut(value).to(parameter.device, copy=True), slicing)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Returns other arguments where a closure computes the gradients, for they cannot be checked before it has run.

    So it does where parameters rest in files (`paged.py`).
    """
    engines = _engines_of(optimizer)
    lays_whole = any(engine.lays_whole for engine in engines)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _REPLACED):
                raise UsageError(
                    f"the optimizer holds {getattr(parameter, _REPLACED)!r} as it was before onecopy.shard: make the "
                    f"optimizer after onecopy.shard, and after onecopy.materialize of a meta model, or pass it as "
                    f"onecopy.shard(..., optimizer=optimizer)."
                )
        is_sliced = engines and not (lays_whole and all(map(_is_whole, group["params"])))
        if is_sliced and group.get("foreach", False) is None and _may_be_foreach(group):
            # torch chooses foreach for itself only for plain tensors; one dispatch for each parameter is slow.
            group["foreach"] = True
    if not engines:
        return None
    if torch.compiler.is_compiling():
        # Raised as it stands, the error would only make the compiler give this frame up and compile the next.
        torch.compiler.disable(_refuse_compiled_step)()
    is_whole = sees_whole(optimizer, lays_whole=lays_whole)
    _slice_states(optimizer)
    stores = _files_of(engines)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if stores is not None:
        reserve_states(optimizer, engines[0].mesh, has_closure=callable(closure), sees_whole=is_whole)
        stepped = page_step(optimizer, stores, sees_whole=is_whole)
    else:
        stepped = owned_step(optimizer) if is_whole else optimizer
    args = (stepped, *args[1:])

    def begin() -> None:
        _gradients_are_there(optimizer, engines)
        if is_owned_step(stepped):
            show_gradients(optimizer)
        if is_whole:
            write_begins(optimizer)

    if not callable(closure):
        begin()
        return (args, kwargs) if stepped is not optimizer else None

    def checked() -> Any:
        loss = closure()
        begin()
        return loss

    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def _files_of(engines: list[Engine]) -> Stores | None:
    """The stores of those whose parameters rest in files."""
    return next((engine.stores for engine in engines if engine.stores and engine.stores.optimizer), None)


def _refuse_compiled_step() -> NoReturn:
    raise UsageError(
        "torch.compile cannot compile the optimizer's step over a sharded model's slices: call optimizer.step() "
        "without torch.compile. For speed make the optimizer with fused=True."
    )


def _may_be_foreach(group: dict[str, Any]) -> bool:
    """Whether the optimizer has a choice. Hyperparameters that are tensors are for its loop over parameters."""
    return not (
        group.get("fused")
        or group.get("differentiable")
        or any(
            isinstance(value, Tensor)
            for name, option in group.items()
            if name != "params"
            for value in (option if isinstance(option, tuple) else (option,))
        )
    )


def _gradients_are_there(optimizer: Optimizer, engines: list[Engine]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, SlicedTensor):
                _check_gradient(parameter)
    for engine in engines:
        engine.before_step()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if engines := _engines_of(optimizer):
        if (stores := _files_of(engines)) is not None:
            end_paged_step(optimizer, args[0], stores)
        if is_owned_step(args[0]):
            end_owned_step(optimizer, args[0])
        nbytes = _state_bytes(optimizer)
        for engine in engines:
            engine.step_done(optimizer, nbytes)


def _check_gradient(parameter: SlicedTensor) -> None:
    if isinstance(parameter.grad, PendingGradient):
        raise UsageError(
            f"the optimizer was stepped before the gradient of {parameter.slicing.name!r} was reduced over the "
            "ranks: run the step's last micro-batch outside no_sync() (or run as many micro-batches as accumulate= "
            "says), call the model itself and not parts of it, or call model.reduce_gradients() first."
        )
    if parameter.grad is not None and not isinstance(parameter.grad, SlicedTensor):
        raise UsageError(
            f"the gradient of {parameter.slicing.name!r} is a whole tensor, but the optimizer needs a slice of it: "
            "write p.grad = torch.zeros_like(p).copy_(whole)."
        )


def _slice_states(optimizer: Optimizer) -> None:
    """Cut states that were loaded whole, and take over those that were loaded in slices, at their first step."""
    need = need_of(optimizer)
    for parameter, states in optimizer.state.items():
        if not isinstance(parameter, SlicedTensor) or not isinstance(states, dict) or is_laid_whole(parameter, need):
            continue
        loaded = [name for name, value in states.items() if _is_loaded(value, parameter)]
        for name in loaded:
            states[name] = _adopted(states[name], parameter)
        if states and not loaded:
            # States are loaded all at once: where one belongs to the model, all do.
            return


def _is_loaded(value: Any, parameter: SlicedTensor) -> bool:
    """Whether a state of ``parameter`` came out of a checkpoint or a file as it was there."""
    if isinstance(value, SlicedTensor):
        return is_saved(value.slicing)
    return (type(value) is Tensor or is_dtensor(value)) and value.dim() > 0 and value.shape == parameter.shape


def _adopted(value: Any, parameter: SlicedTensor) -> Any:
    slicing = parameter.slicing
    if not isinstance(value, SlicedTensor):
        return _sliced_state(value, parameter)
    if not slicing.matches(value.slicing):
        raise UsageError(
            f"a state of the optimizer does not fit this rank: {describe_difference(slicing, value.slicing)}"
        )
    return SlicedTensor(value.local, slicing)


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the optimizer's states on this rank."""
    total = 0
    for states in optimizer.state.values():
        # Some optimizers keep what belongs to no parameter beside the parameters' states.
        for value in states.values() if isinstance(states, dict) else (states,):
            total += _bytes_of(value)
    return total


def _bytes_of(value: Any) -> int:
    if isinstance(value, SlicedTensor):
        return value.held_bytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    if is_traceable_wrapper_subclass(value):
        # Quantised states tell of themselves what they look like, and hold less.
        return sum(_bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def _is_whole(parameter: Any) -> bool:
    return isinstance(parameter, SlicedTensor) and parameter.slicing.is_whole


def _engines_of(optimizer: Optimizer) -> list[Engine]:
    """In the order of the parameters, which is that of all ranks: each engine sends messages before a step."""
    # One reference for each engine, however many parameters.
    references = {
        id(parameter._engine): parameter._engine
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, SlicedTensor) and parameter._engine is not None
    }
    engines = [engine for reference in references.values() if (engine := reference()) is not None]
    return list(dict.fromkeys(engines))
