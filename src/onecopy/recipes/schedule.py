"""Schedule: AdamW and its learning rate over the steps."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from onecopy.recipes.config import Optimizer, Schedule


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters; those with fewer than two dimensions are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def build_schedule(optimizer: torch.optim.Optimizer, config: Schedule) -> LambdaLR:
    """PyTorch's scheduler of `learning_rate_factor`."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))


def learning_rate_factor(step: int, config: Schedule) -> float:
    """Share of the highest learning rate in ``step``, counted from 0.

    It rises in equal parts over the warm-up; unless constant, it then falls to ``final_fraction`` in the last step.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, config.steps - 1 - warmup))
    match config.decay:
        case "constant":
            return 1.0
        case "linear":
            left = 1 - progress
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_fraction + (1 - config.final_fraction) * left
