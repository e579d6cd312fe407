"""Process groups of every make: which devices they serve, and how control messages travel. Oracle: one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import onecopy
from accelerator import BACKEND, NAME
from on_device import reports_of, run_on_device
from onecopy.comm.backends import own_device, serves_cpu, time_limit
from onecopy.errors import CollectiveError
from training import on, run_clean, tiny, trains_like_one_process

pytestmark = pytest.mark.emulated

GROUPS = [BACKEND, f"{NAME}:{BACKEND}", f"cpu:gloo,{NAME}:{BACKEND}"]
"""As "nccl", "cuda:nccl" and "cpu:gloo,cuda:nccl" are given."""


@pytest.mark.parametrize("backend", GROUPS)
def test_a_group_of_any_name_trains(backend: str) -> None:
    def run(rank: int, device: torch.device) -> None:
        group = dist.group.WORLD
        assert serves_cpu(group) == ("cpu" in backend)
        assert own_device(group) == (torch.device("cpu") if "cpu" in backend else device)
        assert time_limit(group).total_seconds() == 25.0
        for stage in (0, 3):
            trains_like_one_process(rank, device, 2, stage=stage)

    run_clean(2, run, backend=backend)


@pytest.mark.parametrize("backend", GROUPS)
def test_ranks_that_gather_in_another_order_are_told_on_every_group(backend: str) -> None:
    """Rank 1 comes through the last two blocks in the other order. NCCL's streams would hang; the hosts must not."""

    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, tiny), 3, prefetch=0)
        tokens = torch.arange(8, device=device)[None] % 7
        model(tokens).backward()
        blocks = list(model.blocks)
        model.blocks._modules = {str(i): blocks[k] for i, k in enumerate((0, 2, 1) if rank else (0, 1, 2))}
        with pytest.raises(CollectiveError, match="ranks came through different units"):
            model(tokens).backward()

    reports = reports_of(run_on_device(2, run, backend=backend))
    assert reports
    assert all(report.startswith("unlike") for report in reports)
