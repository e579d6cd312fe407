"""The same engine on real GPUs, over NCCL: `pytest -m gpu -rs tests/house/test_gpu.py`, on 1, 2 or 8 of them.

What streams and values can show without a GPU is shown on the emulated device (`tests/emulated`), by the same training
cases as here. Here is what it cannot see: NCCL itself, its watchdog, CUDA's allocator, graphs, and a table of times.
Oracles: plain PyTorch in one process on the CPU; CUDA's own complaints about waits of the host; its allocator's
counters.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from gpus import COUNT, run_on_gpus
from models import TinyGPT, seeded, token_batches
from onecopy.errors import CollectiveError
from oracle import OPTIMIZERS
from places import ROOT
from training import on, parts_of, tiny, trains_like_one_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not COUNT, reason="no CUDA device on this machine"),
]

RANKS = sorted({1, min(2, COUNT), min(3, COUNT), COUNT} - {0}) or [1]
"""One rank never comes to a collective; two, three and all of the machine's do."""

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
"""Kernels of a GPU sum in another order than the CPU's."""

CASES: dict[str, dict[str, Any]] = {
    "fp32": CLOSE,
    "fused": {**CLOSE, "optimizer": OPTIMIZERS["adamw-fused"], "atol": 1e-3},
    "bf16": {"precision": "bf16", "half": torch.bfloat16, "rtol": 2e-2, "atol": 1e-2},
    "accumulate": {**CLOSE, "accumulate": 2},
    "small buffers": {**CLOSE, "bucket_bytes": 1000},
    "recomputed": {**CLOSE, "activations": onecopy.Activations()},
    "selective": {**CLOSE, "activations": onecopy.Activations("selective")},
    "offloaded": {**CLOSE, "activations": onecopy.Activations(offload="cpu")},
    "defragmented": {**CLOSE, "defragment": True},
}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(case: str, num_ranks: int) -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage in (0, 1, 2, 3):
            trains_like_one_process(
                rank, device, num_ranks, stage=stage, rows=24 * num_ranks, prefetch_bytes=0, **CASES[case]
            )

    run_on_gpus(num_ranks, run)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_step_has_the_host_wait_for_nothing(num_ranks: int) -> None:
    """Oracle: `torch.cuda.set_sync_debug_mode`, which makes an error of every wait."""

    def run(rank: int, device: torch.device) -> None:
        for stage in (0, 1, 2, 3):
            model = onecopy.shard(on(device, tiny), stage, precision="bf16")
            optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
            batches = parts_of(token_batches(6, rows=24 * num_ranks), rank, num_ranks, device)
            for number, batch in enumerate(batches):
                torch.cuda.set_sync_debug_mode("error" if number >= 3 else "default")
                model(*batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("default")

    run_on_gpus(num_ranks, run)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("defragment", [False, True])
def test_a_steady_step_takes_no_memory_from_the_driver(num_ranks: int, defragment: bool) -> None:
    """Oracle: the allocator's count of calls to the driver, and what it holds beyond live tensors."""

    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(
            on(device, lambda: seeded(TinyGPT, layers=6, dim=96, heads=4)), 3, precision="bf16", defragment=defragment
        )
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        calls = []
        for batch in parts_of(token_batches(12, rows=24 * num_ranks), rank, num_ranks, device):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize(device)
            calls.append(torch.cuda.memory_stats(device)["num_device_alloc"])
        assert calls[-1] == calls[5], f"calls to the driver by step: {calls}"

    run_on_gpus(num_ranks, run)


def test_a_graph_of_a_gathered_block_replays_what_the_block_computes() -> None:
    """Oracle: the same block, called."""

    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, tiny), 3)
        x = torch.randn(2, 7, 12, device=device)
        with onecopy.gathered(model), torch.no_grad():
            for _ in range(3):
                expected = model.blocks[0](x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = model.blocks[0](x)
            graph.replay()
            torch.testing.assert_close(found, expected)

    run_on_gpus(1, run)


@pytest.mark.skipif(COUNT < 2, reason="one GPU: no rank to wait for")
def test_a_rank_that_stays_away_is_named_before_nccls_watchdog_ends_the_process() -> None:
    def run(rank: int, device: torch.device) -> float:
        model = onecopy.shard(on(device, tiny), 2)
        (tokens,) = token_batches(1)[0]
        model(tokens.to(device)).backward()
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(CollectiveError, match="no answer from rank 1"):
                model(tokens.to(device)).backward()
        else:
            time.sleep(25)
        return time.monotonic() - start

    waited = run_on_gpus(2, run, group_timeout=20.0)[0]
    assert waited < 20


def test_the_table_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints it; what is asserted is that every system trains the same model."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with capsys.disabled():
        print(f"\n{socket.gethostname()}\n{done.stdout}")
    rows = [line for line in done.stdout.splitlines() if line.startswith(("DDP", "onecopy", "fully_shard"))]
    losses = [float(row.split()[-1]) for row in rows]
    assert len(losses) == 7
    assert losses == pytest.approx([losses[0]] * 7, rel=2e-2)
