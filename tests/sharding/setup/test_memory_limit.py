"""What does not fit in memory trains on disk: a hard limit, RLIMIT_DATA, that the kernel holds a rank to.

The oracle for losses is plain PyTorch in one process without a limit; for memory it is the kernel, which refuses.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import onecopy
from onecopy import Offload
from onecopy.sharding.setup.api import engine_of
from ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux alone")

WIDTH, LAYERS = 512, 96
STATES = 16 * LAYERS * WIDTH**2
"""Bytes: masters, gradients and two moments in fp32."""

LIMIT = STATES // 4
"""Bytes that a rank may take beyond what Python and torch have taken before the model is made."""


_M_MMAP_THRESHOLD = -3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _begin(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.normal_(0.0, 0.02, generator=generator)


def _train(model: nn.Module) -> list[float]:
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(offload: Offload | None) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Net()
    onecopy.shard(model, 3, offload=offload)
    return onecopy.materialize(model, init=lambda module: _begin(module, generator))


def _without_limit(_: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    model = Net()
    for module in model.modules():
        _begin(module, generator)
    return _train(model)


def _limit() -> None:
    # Freed memory goes back to the system, as with MALLOC_MMAP_THRESHOLD_=65536 in the environment.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    status = Path("/proc/self/status").read_text().splitlines()
    most = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024 + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def test_states_four_times_the_limit_train_on_disk_with_the_losses_of_a_run_without_limit(tmp_path: Path) -> None:
    def limited(_: int) -> tuple[list[float], int]:
        _limit()
        model = _sharded(Offload(optimizer=tmp_path, parameters=tmp_path))
        losses = _train(model)
        stores = engine_of(model).stores
        assert stores is not None
        assert stores.optimizer is not None
        return losses, stores.optimizer.size

    (expected,) = run_ranks(1, _without_limit, group=False)
    ((losses, held),) = run_ranks(1, limited, group=False)
    assert losses == expected
    assert held == STATES


def test_without_offload_the_same_limit_is_an_error_that_names_the_bytes() -> None:
    def limited(_: int) -> str:
        _limit()
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate") as caught:
            _train(_sharded(None))
        return str(caught.value)

    run_ranks(1, limited, group=False)
