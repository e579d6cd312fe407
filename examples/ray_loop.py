"""The plain loop under Ray Train at stage 3: a worker is lost on the way, and the run goes on from its checkpoint.

    python examples/ray_loop.py

What differs from a run under DDP: `onecopy.shard` in place of `ray.train.torch.prepare_model`, and `onecopy.load` where
a worker begins.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import onecopy


def make_model(width: int = 64) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4))
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


def train(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has started the process group."""
    rank, checkpoints = torch.distributed.get_rank(), Path(config["folder"], "checkpoints")
    torch.manual_seed(0)
    model = onecopy.shard(make_model(), stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, losses = 0, []
    if checkpoints.exists():
        loaded = onecopy.load(checkpoints, model, optimizer)
        first, losses = loaded.step, loaded.extra["losses"]
    for step in range(first + 1, 61):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x.sum(-1).sin())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            onecopy.save(checkpoints, model, optimizer, step=step, extra={"losses": losses}, keep=2)
        if step == 35 and rank == 1 and first == 0:
            os._exit(1)  # the machine is lost
    if rank == 0:
        Path(config["folder"], "result.json").write_text(json.dumps({"resumed": first, "losses": losses}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()
        ray.shutdown()
        result = json.loads(Path(folder, "result.json").read_text())
    losses = result["losses"]
    print(f"a worker was lost, and the run went on from step {result['resumed']}")
    print(f"loss: {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
