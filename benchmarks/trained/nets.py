"""The other models that benchmarks train, in plain PyTorch: Llama-like, ResNet-50, many narrow layers, and LoRA.

All take a batch to its loss, and keep in `blocks` what is repeated: every system makes that its unit.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trained.gpt import GPT, Block, Shape

HIDDEN: Final = 32
"""Width of the narrow layers."""


class Narrow(nn.Module):
    """Many layers that compute next to nothing: `linear` has 2 parameters in each, `block` (a transformer's) has 12."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        shape = Shape(hidden=HIDDEN, heads=2)
        self.blocks = nn.ModuleList(
            Block(shape) if kind == "block" else nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)
        )
        for layer in self.blocks:
            if isinstance(layer, nn.Linear):
                # Through hundreds of layers anything smaller ends in denormal numbers, which CPUs are slow in.
                nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x.float().square().mean()


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(batch, length, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, size) (RoFormer, arXiv 2104.09864, eq. 34)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** -(torch.arange(half) / half))
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


class Llama(nn.Module):
    """Tokens (batch, length) and targets to the mean loss; 4 M parameters and a tied vocabulary of 64 k (16.8 M)."""

    def __init__(self, vocabulary: int = 65536, layers: int = 5, hidden: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, inner=704) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al., arXiv 1512.03385, Figure 5 right)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images (batch, 3, height, width) and classes to the mean loss; 25.6 M parameters (the same paper, Table 1)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks, channels = [], 64
        for position, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for number in range(depth):
                blocks.append(Bottleneck(channels, width, stride=2 if position and not number else 1))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), classes)


class LowRank(nn.Module):
    """A frozen linear layer and what is trained in its place (LoRA, arXiv 2106.09685, eq. 3)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        # From zeros, as the paper has it, `a` would have no gradient in the first steps that are compared here.
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def lora_gpt(shape: Shape, rank: int = 8) -> GPT:
    """A frozen GPT with low-rank updates on the attention's linear layers."""
    model = GPT(shape).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv, rank), LowRank(block.out, rank)  # type: ignore[assignment, arg-type]
    return model
