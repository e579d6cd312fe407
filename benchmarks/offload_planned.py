"""The planner's step times for offload beside runs here, with the bandwidths that `onecopy plan --here` measures.

    TMPDIR=/a/directory python benchmarks/offload_planned.py /a/directory --layers 32

One rank, fp32, AdamW fused, states on disk at stage 2, and parameters there too at stage 3. Planned: the formulas of
planner/answer/estimate.py, of which "update" is the CPU's step and "transfer" what of the I/O does not hide behind it
and behind computing. Measured: medians of a step's parts. Computing is taken as measured, for the planner's rate of
operations is that of large products and the model's are small: what is held against runs is what offload adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import onecopy
from offload import MAKE, WIDTH, Net
from onecopy.planner.answer.estimate import Job, Option, update_seconds
from onecopy.planner.machine.here import look
from onecopy.planner.model.shape import from_count

ROWS = {"optimizer on nvme": (2, False), "parameters on nvme": (3, True)}


def measure(directory: Path, layers: int, stage: int, parameters: bool, rows: int) -> dict[str, float]:
    """Seconds of a step's parts in memory and offloaded, medians of steps taken in turn."""
    offload = onecopy.Offload(directory, directory if parameters else None)
    x = torch.randn(rows, WIDTH)
    models = {
        "memory": onecopy.shard(Net(layers), stage, units=[nn.Linear]),
        "disk": onecopy.shard(Net(layers), stage, units=[nn.Linear], offload=offload),
    }
    optimizers = {name: MAKE["adamw-fused"](model.parameters()) for name, model in models.items()}
    taken: dict[str, list[float]] = {f"{part} {name}": [] for name in models for part in ("compute", "step")}
    for _ in range(7):
        for name, model in models.items():
            began = perf_counter()
            model(x).backward()
            computed = perf_counter()
            optimizers[name].step()
            ended = perf_counter()
            optimizers[name].zero_grad()
            taken[f"compute {name}"].append(computed - began)
            taken[f"step {name}"].append(ended - computed)
    return {name: statistics.median(seconds[2:]) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where states rest; --here measures TMPDIR")
    parser.add_argument("--layers", type=int, default=32, help="of a million parameters each")
    parser.add_argument("--rows", type=int, default=64, help="of a batch: more of them compute longer")
    parser.add_argument("--json", type=Path, help="write what was found here too")
    own = parser.parse_args()
    torch.manual_seed(0)
    machine, words = look(2)
    print(words)
    machine = replace(machine, gpus=1)
    job = Job(from_count(own.layers * WIDTH * WIDTH), own.rows, "fp32")
    found = []
    for name, (stage, parameters) in ROWS.items():
        taken = measure(own.directory, own.layers, stage, parameters, own.rows)
        option = Option(stage, 1, 1, "off", name, 1)
        update, transfer = update_seconds(job, machine, option, own.layers * WIDTH * WIDTH, taken["compute memory"])
        planned = taken["compute memory"] + update + transfer
        measured = taken["compute disk"] + taken["step disk"]
        row = {
            "option": name,
            "planned": planned,
            "measured": measured,
            "update": update,
            "transfer": transfer,
            **taken,
        }
        found.append(row)
        print(f"{name:<20} planned {planned:7.3f} s   measured {measured:7.3f} s   {planned / measured - 1:+.0%}")
        print("  " + "   ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float)))
    if own.json:
        own.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
