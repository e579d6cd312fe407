"""Offload beside DeepSpeed's on the same model: seconds of the optimizer's part and of a whole step, and peak memory.

    python benchmarks/offload_peer.py /a/directory --layers 64

One rank, fp32, AdamW. Two places for the optimizer's states: host memory, where DeepSpeed has its CPU Adam, and files
in the directory, where it needs libaio's headers to build its reader. Each system runs in a process of its own, in
turn, for so many rounds; the medians are over rounds of the median of a process's steps. Peak memory is the process's
resident peak less what it held before the model was made, with all libraries loaded. DeepSpeed's parts are built once,
before anything is measured, in TORCH_EXTENSIONS_DIR or else below the directory. Where DeepSpeed is not installed, or
does not build, its rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import onecopy
from offload import MAKE, WIDTH, Net

STEPS = 6
_BUILD_SECONDS = 1800
_RUN_SECONDS = 600


def _prepare_onecopy(place: str) -> None:
    """Nothing: it was imported."""


def _onecopy(place: str, directory: Path, layers: int) -> Any:
    model = Net(layers)
    offload = onecopy.Offload("cpu" if place == "host" else directory)
    onecopy.shard(model, 3 if place == "disk" else 2, units=[torch.nn.Linear], offload=offload)
    optimizer = MAKE["adamw-fused"](model.parameters())

    def step(x: torch.Tensor) -> float:
        model(x).backward()
        began = perf_counter()
        optimizer.step()
        seconds = perf_counter() - began
        optimizer.zero_grad()
        return seconds

    return step


def _prepare_deepspeed(place: str) -> None:
    """Load what is built, and meet the other ranks, of which there are none."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    if place == "disk":
        AsyncIOBuilder().load(verbose=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    deepspeed.init_distributed(dist_backend="gloo")


def _deepspeed(place: str, directory: Path, layers: int) -> Any:
    import deepspeed

    where: dict[str, Any] = {"device": "cpu"}
    if place == "disk":
        where = {"device": "nvme", "nvme_path": str(directory), "pipeline_read": True, "pipeline_write": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3 if place == "disk" else 2, "offload_optimizer": where},
        "aio": {"block_size": 4 * 2**20, "queue_depth": 32, "thread_count": 4},
    }
    model = Net(layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(x: torch.Tensor) -> float:
        engine.backward(engine(x))
        began = perf_counter()
        engine.step()
        return perf_counter() - began

    return step


SYSTEMS = {"onecopy": (_prepare_onecopy, _onecopy), "DeepSpeed": (_prepare_deepspeed, _deepspeed)}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(system: str, place: str, directory: Path, layers: int) -> dict[str, float]:
    """In this process: medians in seconds, and bytes."""
    torch.manual_seed(0)
    prepare, make = SYSTEMS[system]
    prepare(place)
    before = _resident()
    step = make(place, directory, layers)
    x = torch.randn(4, WIDTH)
    optimizer, whole = [], []
    for _ in range(STEPS):
        began = perf_counter()
        optimizer.append(step(x))
        whole.append(perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {"optimizer": statistics.median(optimizer[2:]), "step": statistics.median(whole[2:]), "peak": peak - before}


def _build(directory: Path) -> None:
    """Build DeepSpeed's parts where nobody else builds: a lock that a killed build left would be waited for."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        own = directory / "torch_extensions"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(own)
        for lock in own.glob("**/lock"):
            lock.unlink()
    for part in ("host", "disk"):
        failed = _told(["--one", "DeepSpeed", "--place", part, "--build", str(directory)], _BUILD_SECONDS)
        if isinstance(failed, str):
            print(f"DeepSpeed's part for {part} is not built: {failed}")


def _in_a_process(system: str, place: str, directory: Path, layers: int) -> dict[str, float] | str:
    return _told([str(directory), "--layers", str(layers), "--one", system, "--place", place], _RUN_SECONDS)


def _told(arguments: list[str], seconds: int) -> dict[str, float] | str:
    """What a process of this program prints, or why it printed nothing."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end in {seconds} s"
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where states rest")
    parser.add_argument("--layers", type=int, default=32, help="of a million parameters each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SYSTEMS, help="measure one system in this process, and print JSON")
    parser.add_argument("--place", choices=("host", "disk"), default="host")
    parser.add_argument("--build", action="store_true", help="with --one: only load what it needs")
    parser.add_argument("--json", type=Path, help="write what was found here too")
    own = parser.parse_args()
    if own.one and own.build:
        SYSTEMS[own.one][0](own.place)
        print("{}")
        return
    if own.one:
        print(json.dumps(measure(own.one, own.place, own.directory, own.layers)))
        return
    own.directory.mkdir(parents=True, exist_ok=True)
    _build(own.directory)
    rows: list[dict[str, Any]] = []
    for place in ("host", "disk"):
        rounds = [
            {system: _in_a_process(system, place, own.directory, own.layers) for system in SYSTEMS}
            for _ in range(own.rounds)
        ]
        for system in SYSTEMS:
            found = [one[system] for one in rounds]
            measured = [one for one in found if isinstance(one, dict)]
            if len(measured) < len(found):
                print(f"{place:<6}{system:<11}not measured: {next(one for one in found if isinstance(one, str))}")
                continue
            row = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
            rows.append({"place": place, "system": system, **row})
            print(
                f"{place:<6}{system:<11}optimizer {row['optimizer']:8.3f} s   step {row['step']:8.3f} s   "
                f"peak {row['peak'] / 1e6:8.0f} MB"
            )
        here = [row for row in rows if row["place"] == place]
        if len(here) == len(SYSTEMS):
            mine, theirs = here
            print(
                f"{place:<6}onecopy is {theirs['step'] / mine['step']:.2f} times as fast in a step, "
                f"{theirs['optimizer'] / mine['optimizer']:.2f} times in the optimizer's part, with "
                f"{mine['peak'] / theirs['peak']:.2f} times the peak"
            )
    if own.json:
        own.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
