"""benchmarks/gpu.py, as far as it goes without a GPU. Oracles: hand-made kernels; DDP's losses."""

from __future__ import annotations

import pytest
import torch

import gpu
from on_device import run_on_device
from trained.gpt import Shape

pytestmark = pytest.mark.emulated


def test_communication_is_exposed_while_no_other_kernel_runs() -> None:
    spans = [
        ("gemm", 0.0, 10.0),
        ("ncclDevKernel_AllGather", 5.0, 15.0),  # 10 to 12 and 13 to 15
        ("add", 12.0, 13.0),
        ("ncclDevKernel_ReduceScatter", 14.0, 18.0),  # to 18, the first one meanwhile
        ("copy", 30.0, 31.0),
        ("ncclDevKernel_AllReduce", 30.0, 30.5),
    ]
    assert gpu.exposed(spans) == pytest.approx(2 + 5)
    assert gpu.exposed([]) == 0


def test_every_system_trains_the_same_model() -> None:
    shape = Shape(layers=3, hidden=16, heads=2, vocabulary=31, positions=8)
    systems = [system for system in gpu.SYSTEMS if not system.startswith("DeepSpeed")]

    def run(rank: int, device: torch.device) -> list[gpu.Row]:
        return [gpu.measure(system, shape, device, samples=2, steps=2, warmup=1) for system in systems]

    rows = run_on_device(2, run)[0].result
    assert [row.system for row in rows] == systems
    assert [row.loss for row in rows] == pytest.approx([rows[0].loss] * len(rows), rel=2e-2)
    assert gpu.table(rows).count("\n") == len(rows)
