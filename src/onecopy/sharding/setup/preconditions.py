"""Preconditions: what must hold of a model, an optimizer and settings before `shard` changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer

from onecopy.comm.mesh import Mesh
from onecopy.errors import SettingsError, UsageError
from onecopy.memory.store.offload import Offload
from onecopy.sharding.bucket.bucket import FoundParameter
from onecopy.sharding.engine.engine import ENGINE
from onecopy.sharding.tensor.precision import Precision
from onecopy.sharding.tensor.sliced import SlicedTensor
from onecopy.stage import Stage


def check_count(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SettingsError(f"{name} must be a whole number of at least {at_least}; found {value!r}")


def check_kind(name: str, value: object, kind: type | UnionType, expected: str) -> None:
    if not isinstance(value, kind):
        raise SettingsError(f"{name} must be {expected}; found {value!r}")


def check_masters_are_wide(
    scopes: Mapping[str, Sequence[FoundParameter]], precision: Precision, offload: Offload
) -> None:
    """Raise `SettingsError` where gradients would be summed on the device, for masters elsewhere are too narrow."""
    for item in (item for found in scopes.values() for item in found if item.parameter.requires_grad):
        moves = offload.on_disk("optimizer") or item.parameter.device.type != "cpu"
        if moves and precision.for_parameter(item.parameter.dtype, True).sums_wider:
            raise SettingsError(
                f"offload= would keep the masters in {item.parameter.dtype}, the dtype of {item.name!r}, which is "
                'narrower than the sums of gradients: pass precision="bf16", which keeps fp32 masters off the '
                "device, or shard an fp32 model"
            )


def check_holds_once(optimizer: Optimizer, scopes: Mapping[str, Sequence[FoundParameter]]) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for found in scopes.values():
        for item in found:
            if sum(id(parameter) in held for parameter in (item.parameter, *item.twins)) > 1:
                raise UsageError(
                    f"optimizer= holds {item.name!r} twice, as two parameters that share memory, and onecopy.shard "
                    "makes one parameter of them: make the optimizer from model.parameters() after onecopy.shard."
                )


def check_not_hooked(scopes: Mapping[str, Sequence[FoundParameter]]) -> None:
    for found in scopes.values():
        for item in found:
            if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in (item.parameter, *item.twins)):
                raise SettingsError(
                    f"parameter {item.name!r} has gradient hooks, which would not run on a sharded parameter: remove "
                    f"them and read p.grad after backward instead."
                )


def check_not_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise UsageError(
                f"module {name or '(root)'!r} is a {type(module).__name__}, which would keep whole parameters and "
                "gradients of its own: give onecopy.shard the model inside it (`.module`), and leave the wrapper out."
            )
        sharded = any(isinstance(p, SlicedTensor) for p in module._parameters.values()) or hasattr(module, ENGINE)
        if sharded:
            raise UsageError(
                f"module {name or '(root)'!r} is sharded already: call onecopy.shard once, on the outermost module. "
                "To choose what is gathered together, pass units=."
            )


def check_mirror(mirror: object, mesh: Mesh, stage: Stage, offload: Offload | None, device: torch.device) -> None:
    """Raise `SettingsError` where no other rank can hold slices, or where another one does already."""
    if mirror not in (False, True, "cpu"):
        raise SettingsError(f'mirror must be False, True or "cpu"; found {mirror!r}')
    if not mirror:
        return
    if mirror == "cpu" and device.type not in ("cpu", "meta"):
        raise SettingsError(
            f'mirror="cpu" cannot hold the mirror of a model on {device.type} in host memory yet: pass mirror=True, '
            f"which holds it on the device"
        )
    if not stage.shards_optimizer:
        raise SettingsError("mirror= has nothing to do at stage 0, where every rank holds everything: leave it out")
    if mesh.tensor.size > 1:
        raise SettingsError(
            "mirror= cannot be combined with tensor parallelism yet: shard without it, and save checkpoints often"
        )
    if mesh.copies > 1:
        raise SettingsError(
            f"mirror= is not needed where {mesh.copies} ranks hold each slice already (copies=, or a mesh with a "
            f'"replicate" axis): leave it out'
        )
    if mesh.shard.size == 1:
        raise SettingsError("mirror= needs another rank to hold slices, and there is one rank")
    if offload is not None:
        raise SettingsError(
            "mirror= cannot be combined with offload= yet: mirrors rest in memory beside the slices. Shard without "
            "one of them."
        )
