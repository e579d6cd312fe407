"""Models whose weights are tied, odd in shape or layout, tiny, mixed, or used twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import VOCAB


class TiedInside(nn.Module):
    """Each block's two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)) for _ in range(2))
        for block in self.blocks:
            block[2].weight = block[0].weight
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


class TiedAcross(nn.Module):
    """An embedding and a head share a weight whose rows no number of ranks divides, and are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Odd(nn.Module):
    """Parameters that cannot be cut along their first dimension: 0-dim, empty, of one element, of shape (2, k)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.wide = nn.Linear(10, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out = self.head(self.wide(x * self.scale) + self.single)
        return F.mse_loss(out, y) + self.empty.sum()


class TinyOnly(nn.Module):
    """Fewer elements than ranks in the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x[:, :3] * self.scale, y)


class Transposed(nn.Module):
    """Weights whose memory is not that of their shape: transposed, and cut out of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 10).t())
        self.strided = nn.Parameter(torch.randn(6, 6)[:, ::2])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(x @ self.transposed) @ self.strided, y)


class Convolutions(nn.Module):
    """channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(3, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for block in self.blocks:
            assert block.weight.is_contiguous(memory_format=torch.channels_last)
            x = torch.tanh(block(x))
        return F.mse_loss(self.head(x.mean((2, 3))), y)


class Ordered(nn.Linear):
    """fp32, fp64 and int64 parameters in one block."""

    def __init__(self) -> None:
        super().__init__(10, 10)
        self.gain = nn.Parameter(torch.rand(10, dtype=torch.float64))
        self.order = nn.Parameter(torch.randperm(10), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).double() * self.gain).float()[:, self.order]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ordered() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.mse_loss(self.head(x), y)


class Reused(nn.Module):
    """One block called three times, and one parameter used twice by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))
        self.shift = nn.Parameter(torch.randn(10))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks[0](x + self.shift)
        x = self.blocks[1](self.blocks[0](x))
        return F.mse_loss(self.head(self.blocks[0](x) - self.shift), y)
