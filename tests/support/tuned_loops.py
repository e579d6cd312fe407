"""What the tests tune: a small model, and a workload that fails where it is told to.

Where it fails is the candidate's ``bucket_bytes``, which small models do not come to: one host of probes, which has
imported torch once, then serves every kind of failure.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from onecopy.planner.engine.simulate import Batch
from onecopy.planner.machine.machine import Gpu, Machine
from onecopy.recipes.world import World
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.workload import OwnLoop

MACHINE: Final = Machine(
    2,
    Gpu(4e9, 2e10, 1e9, 5e9, 5e9, name="made up"),
    host_memory=8e9,
    computes_on_host=True,
    utilisation=0.5,
    link_efficiency=1.0,
    crowding=0.0,
    latency=1e-4,
)
"""So that nothing is measured before the first probe."""

WIDTH: Final = 16

MUCH: Final = 300 * 2**20
"""Bytes that those kinds take that run out of memory, far beyond what `LIMIT_OVER` leaves."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            x = x + taken().sum()
        if self.fails == "backward":
            x = _TakesInBackward.apply(x * self.blocks[0][0].weight.shape[0])  # type: ignore[assignment]
        if self.fails == "raises":
            raise KeyError("a fault of the model")
        if self.fails == "hang" and _rank() == 1:
            time.sleep(600)
        if self.fails == "crash" and _rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fails == "killed" and _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _TakesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + taken().sum()


def taken() -> Tensor:
    """So much memory, touched."""
    return torch.ones(MUCH // 4)


def _rank() -> int:
    return torch.distributed.get_rank()


def build() -> nn.Module:
    return Net()


def batches(samples: int) -> tuple[Tensor, ...]:
    x = torch.randn(samples, WIDTH, requires_grad=True)
    return (x.detach().requires_grad_(),)


def one_too_many(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples + 1, WIDTH),)


def no_batch(samples: int) -> Any:
    return [samples]


KINDS: Final = ("", "forward", "backward", "step", "load", "hang", "crash", "killed", "raises")
"""Ways to fail, numbered by `fails`."""


def fails(kind: str) -> Candidate:
    """A candidate that fails so."""
    return Candidate(2, 4, 1, 2, bucket_bytes=KINDS.index(kind))


class Faulty(OwnLoop):
    """`Net` in a loop that fails as the candidate says. Of three samples no batch can be made."""

    def batch(self, samples: int) -> Batch:
        if samples == 3:
            raise OSError("no such file: data.bin")
        return super().batch(samples)

    def shard(self, model: nn.Module, candidate: Candidate, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        kind = KINDS[candidate.bucket_bytes]
        model.fails = kind  # type: ignore[assignment]
        if kind == "load":
            taken()
        sharded, optimizer = super().shard(model, Candidate(candidate.stage, 4, 1, 2), world)
        if kind == "step":
            optimizer.register_step_pre_hook(_take)
        return sharded, optimizer


def _take(*_: Any) -> None:
    taken()
