"""What Accelerate's preparing makes of sharded models and their optimizers, for its Accelerator and for Trainers."""

from __future__ import annotations

from typing import Any

import accelerate
from torch import nn
from torch.optim import Optimizer

from onecopy.sharding.engine.engine import find_engine


def is_sharded(model: nn.Module) -> bool:
    """Whether `onecopy.shard` has sharded this model."""
    return find_engine(model) is not None


def prepare_model(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Prepare a model as the accelerator does: autocast, compilation; but a sharded one is never wrapped into DDP.

    Asking for evaluation mode is how transformers has models prepared that take care of their own gradients.
    """
    if is_sharded(model):
        device_placement, evaluation_mode = False, True
    return accelerate.Accelerator.prepare_model(accelerator, model, device_placement, evaluation_mode)


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that Accelerate has wrapped."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer
