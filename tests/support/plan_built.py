"""Models for `onecopy plan` whose factories do more than build; there are no inputs for them."""

from __future__ import annotations

import torch
from torch import nn


def moved() -> nn.Module:
    """As libraries of adapters do: converted and moved inside of the factory."""
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16).to("cpu").float()


def truncated() -> nn.Module:
    """Its initialisation looks at what it has drawn."""
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return layer
