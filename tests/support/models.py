"""Small models that several tests train: forward takes a batch and returns the mean loss over its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 29
"""A prime: no number of ranks divides it."""


class Attention(nn.Module):
    """Causal self-attention without biases: a key bias has a gradient of truly zero, which Adam turns into noise."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A language model of some four thousand parameters, its head tied to the embedding."""

    def __init__(self, vocab: int = VOCAB, dim: int = 12, heads: int = 2, layers: int = 2, length: int = 7) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.places = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens[:, :-1]).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, tokens[:, 1:].flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Three blocks of two linear layers and a head: the plainest model with units of its own."""

    def __init__(self, width: int = 10, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


class Chain(nn.Module):
    """Three blocks, one after the other, between an entry and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def seeded(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """``kind(*args, **kwargs)`` with the same random values on every call and every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return kind(*args, **kwargs)


def token_batches(count: int, rows: int = 12, length: int = 8, vocab: int = VOCAB) -> list[tuple[Tensor, ...]]:
    """Global batches of random tokens, every row different."""
    generator = torch.Generator().manual_seed(11)
    return [(torch.randint(vocab, (rows, length), generator=generator),) for _ in range(count)]


def vector_batches(count: int, rows: int = 12, width: int = 10, out: int = 3) -> list[tuple[Tensor, ...]]:
    """Global batches (inputs, targets) of random vectors, every row different."""
    generator = torch.Generator().manual_seed(13)
    return [
        (torch.randn(rows, width, generator=generator), torch.randn(rows, out, generator=generator))
        for _ in range(count)
    ]


class FailsBackward(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def filled(value: float) -> nn.Module:
    """Two layers, every parameter of which is ``value``: what a checkpoint holds can be told by one look."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model
