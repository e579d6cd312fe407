"""Every wait of a stream and every record_stream that onecopy asks for, taken away alone: the device must miss it.

The device itself disregards what one line asks for; no code is changed. Oracle: the device's reports, of which there
are none while all orderings hold. So an ordering that nothing misses is redundant, and belongs out of the code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from models import TinyGPT, seeded, token_batches
from on_device import reports_of, run_on_device
from onecopy.activations import checkpoint
from onecopy.sharding.setup.api import engine_of
from oracle import OPTIMIZERS
from training import on, parts_of

pytestmark = pytest.mark.emulated


class Net(TinyGPT):
    """Has a buffer that every forward changes; and adds in place to what a block was given, where it is recomputed."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(layers=3)
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(3))

    def logits(self, tokens: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(x)
            x = x.add_(h) if self.in_place else x + h
        return self.head(self.norm(x))


def _train(rank: int, device: torch.device, stage: int, **settings: Any) -> None:
    model = onecopy.shard(on(device, lambda: seeded(Net, "activations" in settings)), stage, **settings)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for batch in parts_of(token_batches(3), rank, 2, device):
        scaler.scale(model(*batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        with onecopy.gathered(model, write=True):
            for parameter in model.parameters():
                parameter.mul_(2)
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _sharded(rank: int, device: torch.device) -> None:
    _train(rank, device, 3, activations=onecopy.Activations(offload="cpu"), bucket_bytes=2000)
    _train(rank, device, 2, precision="fp16", accumulate=2)


def _replicated(rank: int, device: torch.device) -> None:
    _train(rank, device, 0)
    mesh = dist.init_device_mesh("emu", (2, 1), mesh_dim_names=("replicate", "shard"))
    _train(rank, device, 2, mesh=mesh)


def _partitioned(rank: int, device: torch.device) -> None:
    mesh = dist.init_device_mesh("emu", (1, 2), mesh_dim_names=("shard", "tensor"))
    function = checkpoint(lambda x: torch.tanh(x * 3).sum(), mesh["tensor"], offload="cpu")
    for _ in range(2):
        x = torch.arange(12.0, device=device).requires_grad_()
        function(x * 1).backward()
        assert x.grad is not None
        x.grad.mul_(2)


def _states_on_host(rank: int, device: torch.device) -> None:
    for parameters in (None, "cpu"):
        _train(rank, device, 3, offload=onecopy.Offload("cpu", parameters), accumulate=2)
    model: Any = onecopy.shard(on(device, lambda: seeded(Net, False)), 2, offload=onecopy.Offload("cpu"))
    (batch,) = parts_of(token_batches(1), rank, 2, device)
    model(*batch).backward()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    optimizer.step()
    sizes = [b.layout.slice_numel for unit in engine_of(model).units for b in unit.buckets]
    # Dropped while what the step changed is on its way back, and its memory used for something else.
    del model, optimizer
    gc.collect()
    for size in sizes:
        torch.zeros(size, device=device)


SCENES: dict[str, Callable[[int, torch.device], None]] = {
    "sharded": _sharded,
    "replicated": _replicated,
    "partitioned": _partitioned,
    "states on host": _states_on_host,
}


def test_every_ordering_is_missed_when_it_is_taken_away() -> None:
    asked: dict[str, list[str]] = {}
    for scene, act in SCENES.items():
        seen = run_on_device(2, act)
        assert reports_of(seen) == []
        for ordering in sorted(set().union(*(rank.orderings for rank in seen))):
            if "onecopy/" in ordering:
                asked.setdefault(ordering, []).append(scene)
    not_missed = [
        ordering
        for ordering, scenes in asked.items()
        if not any(reports_of(run_on_device(2, SCENES[scene], without={ordering})) for scene in scenes)
    ]
    print(*asked, sep="\n")
    assert not_missed == []
