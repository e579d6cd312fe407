"""Models over a tensor axis, as Megatron cuts them, with PyTorch's own parallel styles."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import onecopy
from models import VOCAB

DIM = 16


HEADS = 4


class Attention(nn.Module):
    """Causal self-attention whose heads may be spread: it computes as many as its projections give it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A language model that `parallelize_module` can cut, with or without sequence parallelism."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def parallelize(model: nn.Module, tensor: DeviceMesh, sequence: bool, *, head: bool = True) -> nn.Module:
    """The plan of PyTorch's tensor-parallel tutorial; with ``sequence`` activations between layers are cut too."""
    if sequence:
        cut: dict[str, Any] = {"output_layouts": Shard(1)}
        block: dict[str, ParallelStyle] = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        outside: dict[str, ParallelStyle] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        cut = {}
        # Once for q, k and v, whose gradients of it are then added before they are sent, as in Megatron.
        block = {"attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}
        outside = {"head": ColwiseParallel(output_layouts=Replicate())} if head else {}
    for name in ("q", "k", "v"):
        block[f"attention.{name}"] = ColwiseParallel()
    block["attention.out"] = RowwiseParallel(**cut)
    block["mlp.up"] = ColwiseParallel()
    block["mlp.down"] = RowwiseParallel(**cut)
    for layer in model.blocks:  # type: ignore[union-attr]
        parallelize_module(layer, tensor, block)
    return parallelize_module(model, tensor, outside)


def mesh_of(shard: int = 2, tensor: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    with onecopy.gathered(model):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
