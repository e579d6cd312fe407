"""A frozen language model with a trained adapter for `onecopy plan`: a factory, and inputs of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, RANK = 100, 64, 4


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.table.requires_grad_(False)
        self.base.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        result: torch.Tensor = (self.base(hidden) + self.up(self.down(hidden))).mean()
        return result


def build() -> nn.Module:
    return Adapted()


def example_inputs(samples: int, sequence: int = 32) -> tuple[Any, ...]:
    return (torch.zeros(samples, sequence, dtype=torch.long),)
