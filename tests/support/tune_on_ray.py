"""A program that tunes on Ray Train's two workers and writes what became of each setting into a folder.

It is a program of its own, for Ray leaves threads behind in whoever calls it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import onecopy
from tuned_loops import MACHINE, batches, build


def tune(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    space = {"stage": [0, 3], "micro_batch": [2]}
    found = onecopy.tune(build, batches, global_batch=8, space=space, machine=MACHINE, calibration=False, probes=2)
    assert found.best is not None
    kinds = [probe.outcome.kind for probe in found.probes]
    said = {"kinds": kinds, "ranks": found.best.candidate.ranks, "group": dist.get_world_size()}
    Path(config["folder"], f"rank{dist.get_rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        trainer = TorchTrainer(
            tune,
            train_loop_config={"folder": sys.argv[1]},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=sys.argv[1]),
        )
        trainer.fit()
    finally:
        ray.shutdown()
