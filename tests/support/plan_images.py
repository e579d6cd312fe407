"""A model of images for `onecopy plan`: a factory, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plan_models import Sees


def build() -> nn.Module:
    return Sees()


def example_inputs(samples: int) -> tuple[Any, ...]:
    return (torch.zeros(samples, 8, 16, 16),)
