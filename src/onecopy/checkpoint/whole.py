"""Whole tensors of a sharded model or optimizer on one rank, gathered one by one, for formats that know no slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecopy.checkpoint.names import name_tensors
from onecopy.sharding.tensor.single import gather_slices
from onecopy.sharding.tensor.sliced import SlicedTensor


def whole_model(
    model: nn.Module, *, keep: bool, dtype: torch.dtype | None = None, trainable_only: bool = False
) -> dict[str, Tensor]:
    """The state dict that a plain model would have, on the host, under all names of tied weights. Every rank calls it.

    Args:
        keep: on the rank that is to have it; others get an empty one.
        dtype: of floating-point tensors; None keeps that of the masters.
        trainable_only: leave frozen parameters out.
    """
    named = name_tensors(model)
    state: dict[str, Tensor] = {}
    for name, tensor in named.tensors.items():
        if trainable_only and name in named.parameters and not tensor.requires_grad:
            continue
        whole = _whole(tensor)
        if keep:
            wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            state[name] = whole.to("cpu", wanted, copy=True)
    return state | {alias: state[name] for alias, name in named.aliases.items() if name in state}


def whole_optimizer(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors on the host, likewise."""
    sliced = optimizer.state_dict()
    states: dict[Any, Any] = {}
    for number, own in sliced["state"].items():
        whole = {name: _whole(value) if isinstance(value, Tensor) else value for name, value in own.items()}
        if keep:
            states[number] = {
                name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in whole.items()
            }
    return {**sliced, "state": states} if keep else {}


def _whole(tensor: Tensor) -> Tensor:
    return gather_slices(tensor) if isinstance(tensor, SlicedTensor) else tensor.detach()
