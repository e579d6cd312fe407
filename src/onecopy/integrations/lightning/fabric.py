"""What makes Fabric's DDP strategy one of sharded models. The package that it is for comes with the class beside it.

`fabric.setup` shards where DDP would wrap. A checkpoint is a directory, or a plain file with whole tensors.

    DIR/fabric.ckpt     what is not sharded, and which directory holds what is
    DIR/state_0/        the first sharded model with its optimizer, by onecopy.save; state_1 for a second one, and so on
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from onecopy.checkpoint.claim import release
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.checkpoint.whole import whole_model, whole_optimizer
from onecopy.errors import SettingsError
from onecopy.integrations.lightning.settings import take_settings
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.setup.api import shard
from onecopy.sharding.setup.whole import materialize
from onecopy.sharding.tensor.sliced import SlicedTensor

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy

_META: Final = "fabric.ckpt"
_SHARDED: Final = "onecopy"
"""The entry of `_META` that says which directory holds which model: its number, by its key."""


class Called(nn.Module):
    """What Fabric calls in place of the model, so that it runs methods that it was told of through the model's forward.

    Attributes:
        module: the sharded model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)


class _NoSync:
    """Fabric's word for micro-batches that are not the last of a step."""

    def no_backward_sync(self, module: Called, enabled: bool = True) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = module.module.no_sync() if enabled else nullcontext()  # type: ignore[operator]
        return context


class ShardedFabricStrategy(DDPStrategy if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shards what `fabric.setup` is given, in place, with the optimizer that it is given; the loop stays as it is.

    Args:
        stage: 0 to 3.
        checkpoints: "slices" saves directories that every rank writes; "whole" saves one file as under DDP, for which
            the first rank holds all tensors on the host. Both are loaded, and files that were saved under DDP.
        kwargs: `onecopy.shard`'s other settings, and DDPStrategy's (timeout, process_group_backend, ...).

    Raises:
        SettingsError: for settings that cannot work.
    """

    def __init__(self, stage: int = 3, *, checkpoints: str = "slices", **kwargs: Any) -> None:
        self._shard, self._whole = take_settings(stage, checkpoints, kwargs)
        super().__init__(**kwargs)
        self._backward_sync_control = _NoSync()

    # --- setting up

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """With ``empty_init`` a model gets its memory when its slices do."""
        return torch.device("meta") if empty_init else super().module_init_context(empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        if not any(parameter.is_meta for parameter in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> Any:
        return self._sharded(module, None)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        if len(optimizers) > 1:
            raise SettingsError(
                f"fabric.setup was given {len(optimizers)} optimizers for one model, and a model is sharded with one "
                f"at most: call fabric.setup_module(model) first, and make the optimizers from its parameters"
            )
        called = self._sharded(module, optimizers[0] if optimizers else None)
        # Lightning 2.5 expects two.
        return (called, optimizers, scheduler) if self._returns_scheduler() else (called, optimizers)

    def _returns_scheduler(self) -> bool:
        return "scheduler" in inspect.signature(super().setup_module_and_optimizers).parameters

    def _sharded(self, module: nn.Module, optimizer: Optimizer | None) -> Called:
        if find_engine(module) is None:
            on_meta = any(parameter.is_meta for parameter in module.parameters())
            if on_meta and optimizer is not None:
                raise SettingsError(
                    "the model is on meta, so an optimizer that was made from it holds nothing: call "
                    "fabric.setup_module(model) first, and make the optimizer from its parameters"
                )
            shard(module, optimizer=optimizer, **self._shard)
            if on_meta:
                materialize(module, self.root_device)
        return Called(module)

    # --- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> Any:
        return whole_model(_model(module), keep=self.is_global_zero) if _is_sharded(module) else module.state_dict()

    def get_optimizer_state(self, optimizer: Any) -> Any:
        return whole_optimizer(optimizer, keep=self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        _model(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        sharded = {key: one for key, one in state.items() if _is_sharded(one)}
        owners = {} if self._whole else _owners(state, sharded)
        if self._whole or not sharded:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if unusable := (filter or {}).keys() & (sharded.keys() | owners.keys()):
            raise SettingsError(
                f"filter= of {min(unusable)!r}, which is sharded, needs whole tensors: make the strategy with "
                f'checkpoints="whole"'
            )
        place = Path(self.broadcast(path))
        for number, (key, model) in enumerate(sharded.items()):
            own = [state[name] for name, owner in owners.items() if owner == key]
            save(place / f"state_{number}", _model(model), own[0] if own else None, keep=1)
            release(place / f"state_{number}")
        rest = {key: one for key, one in state.items() if key not in sharded and key not in owners}
        rest[_SHARDED] = {key: number for number, key in enumerate(sharded)}
        super().save_checkpoint(place / _META, rest, storage_options, filter)
        self.barrier()

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any) -> dict[str, Any]:
        place = Path(self.broadcast(path))
        if not (place / _META).exists():
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, **kwargs)
            return found
        if isinstance(state, nn.Module):
            load(place / "state_0", _model(state))
            return {}
        state = state or {}
        sharded = {key: one for key, one in state.items() if _is_sharded(one)}
        owners = _owners(state, sharded)
        rest = {key: one for key, one in state.items() if key not in sharded and key not in owners}
        meta: dict[str, Any] = super().load_checkpoint(place / _META, rest, strict, **kwargs)
        numbers: dict[str, int] = meta.pop(_SHARDED)
        if missing := sharded.keys() - numbers.keys():
            raise SettingsError(
                f"the checkpoint {str(place)!r} has no model {min(missing)!r}: it has {', '.join(numbers) or 'none'}"
            )
        for key, model in sharded.items():
            own = [state[name] for name, owner in owners.items() if owner == key]
            load(place / f"state_{numbers[key]}", _model(model), own[0] if own else None)
        state.update(rest)
        return meta


def _model(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Called) else module


def _is_sharded(one: object) -> bool:
    return isinstance(one, nn.Module) and find_engine(_model(one)) is not None


def _owners(state: Mapping[str, Any], sharded: Mapping[str, Any]) -> dict[str, str]:
    """By the key of each optimizer that holds slices, the key of their model."""
    found: dict[str, str] = {}
    for name, one in state.items():
        if not isinstance(one, Optimizer):
            continue
        held = {id(p) for group in one.param_groups for p in group["params"] if isinstance(p, SlicedTensor)}
        of = [key for key, model in sharded.items() if held & {id(p) for p in _model(model).parameters()}]
        if held and not of:
            raise SettingsError(
                f"the optimizer {name!r} is saved and loaded beside its model: put that into state, too"
            )
        if of:
            if of[0] in found.values():
                raise SettingsError(
                    f"{name!r} is a second optimizer of the model {of[0]!r}, and slices are saved with one: make the "
                    f'strategy with checkpoints="whole"'
                )
            found[name] = of[0]
    return found
