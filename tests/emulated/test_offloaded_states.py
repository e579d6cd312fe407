"""Optimizer states, gradients and parameters that rest in host memory, and come to the device and back on streams.

Oracle: plain PyTorch in one process. The device sees what the host does with pinned memory, too.
"""

from __future__ import annotations

import pytest
import torch

import onecopy
from oracle import OPTIMIZERS
from training import run_clean, trains_like_one_process

pytestmark = pytest.mark.emulated

PLACES = {
    "optimizer": onecopy.Offload(optimizer="cpu"),
    "optimizer and parameters": onecopy.Offload(optimizer="cpu", parameters="cpu"),
}


@pytest.mark.parametrize("places", PLACES)
def test_training_equals_one_process(places: str) -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage in (1, 2, 3) if places == "optimizer" else (3,):
            for precision, half in ((None, None), ("bf16", torch.bfloat16)):
                loose = {"rtol": 1e-2, "atol": 5e-3} if half else {}
                trains_like_one_process(
                    rank,
                    device,
                    2,
                    stage=stage,
                    accumulate=2,
                    optimizer=OPTIMIZERS["sgd"],
                    precision=precision,
                    half=half,
                    offload=PLACES[places],
                    **loose,
                )

    run_clean(2, run)
