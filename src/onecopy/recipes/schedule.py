"""Schedule: the optimizers and their learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from onecopy.recipes.config import Optimizer, Schedule
from onecopy.sharding.model.chosen import hidden_matrices


def build_optimizers(model: nn.Module, config: Optimizer) -> list[torch.optim.Optimizer]:
    """What steps over the model's trainable parameters: AdamW, or Muon over hidden matrices and AdamW over the rest."""
    if config.optimizer == "adamw":
        return [build_optimizer(model.parameters(), config)]
    names = {*hidden_matrices(model)}
    muon = torch.optim.Muon(
        [p for name, p in model.named_parameters() if name in names],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        # Its steps are then as large as AdamW's, whose learning rate and decay it takes.
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, build_optimizer([p for name, p in model.named_parameters() if name not in names], config)]


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW over those that are trained; those with fewer than two dimensions are not decayed."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
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


class Schedules:
    """The same schedule over several optimizers.

    Args:
        optimizers: at least one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], config: Schedule) -> None:
        self._each = [build_schedule(optimizer, config) for optimizer in optimizers]

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return float(self._each[0].get_last_lr()[0])

    def step(self) -> None:
        """A step has been taken, or skipped."""
        for schedule in self._each:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; of one optimizer what its scheduler gives."""
        states = [schedule.state_dict() for schedule in self._each]
        return states[0] if len(states) == 1 else {"each": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for schedule, own in zip(self._each, state.get("each", [state]), strict=True):
            schedule.load_state_dict(own)


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
