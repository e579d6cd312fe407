"""Optimizer states, gradients and parameters that rest in host memory or in files, and come to the device and back.

Oracle: plain PyTorch in one process. The device sees what the host does with pinned memory, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onecopy
from models import token_batches
from on_device import the_device
from oracle import OPTIMIZERS
from training import on, parts_of, run_clean, tiny, trains_like_one_process

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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_with_states_in_files_equals_one_process(num_ranks: int, tmp_path: Path) -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage, parameters in ((2, None), (3, None), (3, tmp_path)):
            for precision, half in ((None, None), ("bf16", torch.bfloat16)):
                loose = {"rtol": 1e-2, "atol": 5e-3} if half else {}
                offload = onecopy.Offload(tmp_path, parameters)
                model = trains_like_one_process(
                    rank, device, num_ranks, stage=stage, offload=offload, precision=precision, half=half, **loose
                )
                assert next(iter(model.parameters())).device.type == "cpu"

    run_clean(num_ranks, run)


def test_one_rank_trains_from_host_memory() -> None:
    """What it gathers from is what it computes with."""

    def run(rank: int, device: torch.device) -> None:
        for stage, parameters in ((1, None), (3, None), (3, "cpu")):
            offload = onecopy.Offload("cpu", parameters)
            trains_like_one_process(rank, device, 1, stage=stage, offload=offload, accumulate=2)

    run_clean(1, run)


@pytest.mark.parametrize("stage, parameters", [(2, None), (3, "cpu")])
def test_a_step_before_the_optimizers_has_the_host_wait_for_nothing(stage: int, parameters: str | None) -> None:
    """Forward and backward; the optimizer itself works in host memory and waits for gradients to be there."""

    def run(rank: int, device: torch.device) -> list[str]:
        model = onecopy.shard(on(device, tiny), stage, offload=onecopy.Offload("cpu", parameters))
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        during: list[str] = []
        for batch in parts_of(token_batches(4), rank, 2, device):
            before = len(the_device().host_waits())
            model(*batch).backward()
            during = the_device().host_waits()[before:]
            optimizer.step()
            optimizer.zero_grad()
        return during

    assert [seen.result for seen in run_clean(2, run)] == [[], []]
