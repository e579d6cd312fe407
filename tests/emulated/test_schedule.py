"""Which collectives wait for which, by the device's clocks. Oracle: a kernel's clock holds all that it comes after."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import onecopy
from models import TinyGPT, seeded, token_batches
from on_device import run_on_device, the_device
from oracle import OPTIMIZERS
from training import on, parts_of, run_clean

pytestmark = pytest.mark.emulated

LAYERS = 6


def test_a_gather_does_not_wait_for_the_reduce_before_it() -> None:
    """In backward the gather ahead of unit k - 1 is issued right after the reduce of unit k + 1."""

    def run(rank: int, device: torch.device) -> list[tuple[str, list[int]]]:
        model = onecopy.shard(on(device, lambda: seeded(TinyGPT, layers=LAYERS)), 3)
        for batch in parts_of(token_batches(3), rank, 2, device):
            the_device().clear()
            model(*batch).backward()
        return [(operation, list(after)) for operation, _, _, after in the_device().collectives()]

    for seen in run_on_device(2, run):
        ahead = 0
        for place, (operation, after) in enumerate(seen.result):
            if operation == "all_gather" and place and seen.result[place - 1][0] == "reduce_scatter":
                assert place - 1 not in after, f"{seen.result}"
                ahead += 1
        assert ahead >= LAYERS - 2


class Branch(nn.Module):
    """A block that only some forwards come to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.takes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.takes or number != 2:
                x = x + block(x)
        return x.square().mean()


def test_a_graph_that_garbage_keeps_alive_on_one_rank_changes_nothing() -> None:
    """Rank 1 holds the graph of a forward that it dropped, in a cycle that only the collector would find."""

    def run(rank: int, device: torch.device) -> list[float]:
        gc.disable()
        model = onecopy.shard(on(device, lambda: seeded(Branch)), 3)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        x = torch.linspace(-1, 1, 32, device=device).view(4, 8)
        losses = []
        for step in range(4):
            if step == 0:
                dropped: list[object] = [model(x)]
                if rank:
                    dropped.append(dropped)
                del dropped
            model.takes = step % 2 == 0
            loss = model(x * (rank + 1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    first, second = run_clean(2, run)
    assert first.result[-1] < first.result[0]
    assert second.result[-1] < second.result[0]
