"""Llama 3 as its paper has it: RMS norms, rotary positions, grouped queries, SwiGLU. Plain PyTorch.

Sizes of Llama 3.2 1B and Llama 3.1 8B: their published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama.

    Attributes:
        groups: heads of keys and values.
        intermediate: width inside of an MLP.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    intermediate: int
    vocabulary: int = 128_256
    tied: bool = False


SHAPES: Final = {
    "1b": Shape(16, 2048, 32, 8, 8192, tied=True),
    "8b": Shape(32, 4096, 32, 8, 14336),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups, width = shape.heads, shape.groups, shape.hidden // shape.heads
        self.query = nn.Linear(shape.hidden, shape.heads * width, bias=False)
        self.key = nn.Linear(shape.hidden, shape.groups * width, bias=False)
        self.value = nn.Linear(shape.hidden, shape.groups * width, bias=False)
        self.out = nn.Linear(shape.heads * width, shape.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, heads, -1).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.groups), (self.value, self.groups))
        )
        repeats = self.heads // self.groups
        k, v = (part.repeat_interleave(repeats, dim=1) for part in (_turned(k, turns), v))
        mixed = F.scaled_dot_product_attention(_turned(q, turns), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: both halves of each head turned by an angle that grows with the position."""
    cosine, sine = turns.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens (batch, length) and targets to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 500_000.0 ** -torch.linspace(0, 1, self.width // 2 + 1, device=tokens.device)[:-1]
        angles = places[:, None] * rates
        turns = torch.stack((angles.cos(), angles.sin()))
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
