"""Process groups of every make: which devices they serve, and how control messages travel. Oracle: one process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import onecopy
from accelerator import BACKEND, NAME
from on_device import reports_of, run_on_device
from onecopy.comm.backends import own_device, serves_cpu, time_limit
from onecopy.comm.mesh import make_mesh
from onecopy.errors import CollectiveError, CollectiveTimeout
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
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


def test_who_stays_away_from_a_control_message_is_named_before_the_groups_own_limit() -> None:
    """At that limit NCCL's watchdog ends the process, and does not say who is missing."""

    def run(rank: int, device: torch.device) -> float:
        ranks = make_mesh(None, shards=True, ledger=Ledger(), staging=Staging())
        assert ranks.control_device == torch.device("cpu")
        start = time.monotonic()
        if rank == 1:
            time.sleep(3.5)
        else:
            with pytest.raises(CollectiveTimeout, match=r"agree.*no answer from rank 1 within"):
                ranks.shard.combine(torch.zeros(1), "agree").finish()
        return time.monotonic() - start

    waited = run_on_device(2, run, group_timeout=3.0)[0].result
    assert 2.5 < waited < 3.0


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
