"""Model states in host memory and on disk, on the emulated device. Oracle: plain PyTorch in one process on the CPU.

The device reports races, early reuse and waits of the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from models import token_batches
from on_device import the_device
from onecopy import Offload
from oracle import OPTIMIZERS
from test_training import BF16
from training import on, parts_of, run_clean, tiny, trains_like_one_process

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("where", ["host", "host, with parameters", "files", "files, with parameters"])
def test_training_equals_one_process(where: str, num_ranks: int, tmp_path: Path) -> None:
    place = "cpu" if where.startswith("host") else str(tmp_path)
    parameters = place if where.endswith("parameters") else None

    def run(rank: int, device: torch.device) -> None:
        for stage in (1, 2, 3)[2 if parameters else 0 :]:
            cases: tuple[dict[str, Any], ...] = (
                {"accumulate": 2},
                {"optimizer": OPTIMIZERS["adamw-fused"], "atol": 1e-4},
                BF16,
            )
            for case in cases:
                model = trains_like_one_process(
                    rank, device, num_ranks, stage=stage, offload=Offload(place, parameters), **case
                )
                states = next(iter(model.parameters()))
                assert states.device.type == "cpu"

    run_clean(num_ranks, run)


def test_backward_has_the_host_wait_for_nothing() -> None:
    def run(rank: int, device: torch.device) -> list[str]:
        model = onecopy.shard(on(device, tiny), 2, offload=Offload("cpu"))
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        batches = parts_of(token_batches(4), rank, 2, device)
        during: list[str] = []
        for batch in batches:
            before = len(the_device().host_waits())
            model(*batch).backward()
            during = the_device().host_waits()[before:]
            optimizer.step()
            optimizer.zero_grad()
        return during

    assert [seen.result for seen in run_clean(2, run)] == [[], []]
