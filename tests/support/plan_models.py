"""A model for `onecopy plan tests/support/plan_models.py`-like paths: a factory, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models import Stack


def stack() -> nn.Module:
    return Stack(width=64, layers=4)


def example_inputs(samples: int) -> tuple[Any, ...]:
    return torch.zeros(samples, 64), torch.zeros(samples, 3)


def number() -> int:
    return 3


def broken() -> None:
    raise KeyError("no such size")


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' layer, which is known by its name and where it comes from."""

    __module__ = "bitsandbytes.nn.modules"


def qlora() -> nn.Module:
    """1,024,000 packed weights, 1,000 frozen and 16,000 trained ones."""
    model = nn.Sequential(Linear4bit(1024, 1000), nn.Linear(1000, 16, bias=False))
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


def nothing_to_train() -> torch.nn.Module:
    return torch.nn.Tanh()


class Sees(nn.Module):
    """One convolution of 3 × 3, 8 channels of 16 × 16, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(image).mean()
        return result


made = nn.Linear(2, 2)
"""A model, where a function is asked for that makes one."""
