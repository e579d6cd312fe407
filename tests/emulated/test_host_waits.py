"""No step has the host wait for the device. Oracle: fully_shard, whose steps make no host wait (test_device.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from models import TinyGPT, seeded, token_batches
from on_device import run_on_device, the_device
from oracle import OPTIMIZERS
from training import on, parts_of

pytestmark = pytest.mark.emulated

STEPS = 6


class WithStatistics(TinyGPT):
    """Has a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return super().forward(tokens)


class HasUnused(TinyGPT):
    """Has a block that no forward comes to."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks[2](self.blocks[0](x))))


def waits_of_last_step(rank: int, device: torch.device, num_ranks: int, stage: int, **settings: Any) -> list[str]:
    accumulate = settings.get("accumulate", 1)
    build = settings.pop("build", lambda: TinyGPT(layers=3))
    scaler = torch.amp.GradScaler(device.type) if settings.pop("scales", False) else None
    model = onecopy.shard(on(device, lambda: seeded(build)), stage, **settings)
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    found: list[str] = []
    batches = parts_of(token_batches(STEPS * accumulate), rank, num_ranks, device)
    for step in range(STEPS):
        before = len(the_device().host_waits())
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            loss = model(*batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        found = the_device().host_waits()[before:]
    return found


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "accumulate": {"accumulate": 2},
    "statistics": {"build": WithStatistics},
    "unused": {"build": lambda: HasUnused(layers=3)},
    "recomputed": {"activations": onecopy.Activations()},
    "selective": {"activations": onecopy.Activations("selective")},
    "offloaded": {"activations": onecopy.Activations(offload="cpu")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_clipping_has_the_host_wait_for_nothing(case: str) -> None:
    def run(rank: int, device: torch.device) -> list[list[str]]:
        return [waits_of_last_step(rank, device, 2, stage, **dict(CASES[case])) for stage in (0, 1, 2, 3)]

    for rank in run_on_device(2, run):
        assert rank.result == [[], [], [], []]


def test_gradient_scaling_waits_where_pytorchs_scaler_asks_whether_to_step() -> None:
    """`GradScaler.step` reads its flag with `item()` for optimizers that are not fused, and otherwise not at all."""

    def run(rank: int, device: torch.device) -> list[list[str]]:
        return [waits_of_last_step(rank, device, 2, stage, precision="fp16", scales=True) for stage in (0, 1, 2, 3)]

    for rank in run_on_device(2, run):
        assert rank.result == [[], [], [], []]


def test_exposed_seconds_are_the_devices_and_nobody_waits_for_them() -> None:
    """Oracle: on this device every two events are a millisecond apart."""

    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, lambda: seeded(TinyGPT, layers=3)), 3)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for batch in parts_of(token_batches(3), rank, 2, device):
            model(*batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        page = onecopy.ledger(model).last_step
        assert page is not None
        on_device = [entry for entry in page.entries if entry.op in ("all_gather", "reduce_scatter", "norm")]
        assert {entry.op for entry in on_device} == {"all_gather", "reduce_scatter", "norm"}
        for entry in on_device:
            assert entry.exposed == pytest.approx(entry.calls * 1e-3)

    run_on_device(2, run)
