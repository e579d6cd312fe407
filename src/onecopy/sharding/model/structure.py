"""Structure: a sharded model's modules and parameters stay what they are; a change is refused where it is made.

torch calls global hooks whenever a module or a parameter is registered in another module. Ours leave all modules alone
but those of sharded models, and there let through what brings no parameter that `shard` has not seen.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from onecopy.errors import UsageError
from onecopy.sharding.model.ignored import is_ignored, mark_ignored
from onecopy.sharding.tensor.sliced import SlicedTensor

_guarded: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""From each module of a sharded model to the model."""

_hooked = False


def guard(model: nn.Module) -> None:
    """Refuse changes of ``model``'s structure from now on."""
    global _hooked
    reference = weakref.ref(model)
    for module in model.modules():
        _guarded[module] = reference
    if not _hooked:
        register_module_module_registration_hook(_on_module)
        register_module_parameter_registration_hook(_on_parameter)
        _hooked = True


def whole_model_of(module: nn.Module) -> nn.Module:
    """The sharded model that ``module`` is a part of; ``module`` itself where it is of none."""
    reference = _guarded.get(module)
    model = reference() if reference is not None else None
    return module if model is None else model


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def _on_module(holder: nn.Module, name: str, module: nn.Module | None) -> None:
    if module in _guarded and type(holder).__name__ in _WRAPPERS:
        raise UsageError(
            f"the model is sharded, and all ranks train it already: do not wrap it in {type(holder).__name__}."
        )
    if module is None or (reference := _guarded.get(holder)) is None or (model := reference()) is None:
        return
    for path, part in module.named_modules():
        if part in _guarded:
            continue
        for attribute, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, SlicedTensor) and not is_ignored(parameter):
                inner = ".".join(filter(None, (_path_of(model, holder), name, path, attribute)))
                raise UsageError(
                    f"parameter {inner!r} was added to the model after onecopy.shard, so its gradient would not be "
                    "averaged over ranks: add and replace modules, and resize embeddings "
                    "(model.resize_token_embeddings), before onecopy.shard."
                )
        _guarded[part] = reference


def _on_parameter(holder: nn.Module, name: str, parameter: Tensor | None) -> None:
    if parameter is None or (reference := _guarded.get(holder)) is None or (model := reference()) is None:
        return
    old = holder._parameters.get(name)
    if parameter is old or is_ignored(parameter):
        return
    if old is not None and is_ignored(old):
        mark_ignored(parameter)
        return
    path = ".".join(filter(None, (_path_of(model, holder), name)))
    if old is None:
        raise UsageError(
            f"parameter {path!r} was added to the model after onecopy.shard, so its gradient would not be averaged "
            "over ranks: add parameters before onecopy.shard."
        )
    if old.is_meta:
        raise UsageError(
            f"parameter {path!r} is sharded on the meta device and cannot be assigned to, as "
            "load_state_dict(assign=True) does: first give the model memory and values with "
            "onecopy.materialize(model, device) or onecopy.load_pretrained(model, directory). After that "
            "load_state_dict(state) works."
        )
    raise UsageError(
        f"parameter {path!r} cannot be replaced after onecopy.shard (load_state_dict(assign=True) does that too): edit "
        f"it in place inside `with torch.no_grad(), onecopy.gathered(model, write=True):`, or load without assign. "
        f"Resize embeddings (model.resize_token_embeddings) before onecopy.shard."
    )


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next((path for path, module in model.named_modules() if module is wanted), "")
