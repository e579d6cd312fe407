"""The job of `recovery_peers.py` under torchft: replicas of one rank each, that hold everything and average gradients.

    python trained/torchft_job.py DIRECTORY PLAN            # starts the replicas, and again those that end by a signal
    python trained/torchft_job.py DIRECTORY PLAN RANK       # is one; asks LIGHTHOUSE who else there is

A plan is that of `survivor.py`. `first-PID.json` and `result-RANK.json` are as there; `steps-PID` has a line for each
step that was made, the Unix time of its end. Replicas train until the last one that was started again has made a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trained.survivor import Plan, batches_of, build, loss_at

REPLICAS = 4
LIGHTHOUSE = "LIGHTHOUSE"
STOP = "stop"


def lead(folder: Path, plan: str) -> int:
    """Start replicas, until all losses are made good; the exit code."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=REPLICAS - 1)
    environment = os.environ | {LIGHTHOUSE: lighthouse.address()}

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(folder), plan, str(rank)], env=environment)

    planned = read(plan)
    expected = REPLICAS + sum(loss_at(planned, step, REPLICAS) is not None for step in range(planned.steps))
    replicas = [start(rank) for rank in range(REPLICAS)]
    try:
        while not list(folder.glob("result-*")):
            for rank, replica in enumerate(replicas):
                code = replica.poll()
                if code is not None and code < 0:
                    replicas[rank] = start(rank)
                elif code:
                    return code
            if len(list(folder.glob("first-*"))) == expected:
                (folder / STOP).touch()
            time.sleep(0.01)
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    return 0


def train(folder: Path, plan: Plan, rank: int) -> None:
    """Be a replica."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = build(plan)

    def take() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def give(states: dict[str, Any]) -> None:
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=give,
        state_dict=take,
        min_replica_size=REPLICAS - 1,
        replica_id=str(rank),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ[LIGHTHOUSE],
        hostname="127.0.0.1",
        # All begin alike.
        init_sync=False,
    )
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    wrapped = DistributedDataParallel(manager, model)
    seconds: list[float] = []
    with (folder / f"steps-{os.getpid()}").open("w", buffering=1) as steps:
        while not (folder / STOP).exists():
            began, step = time.perf_counter(), manager.current_step()
            optimizer.zero_grad()
            _end_if_planned(folder, plan, rank, step)
            ((tokens, targets),) = next(batches_of(plan, rank, step % plan.steps))
            loss = wrapped(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if manager.current_step() == step:
                continue
            if not seconds:
                first = {"rank": rank, "steps": manager.current_step(), "stepped": time.time()}
                (folder / f"first-{os.getpid()}.json").write_text(json.dumps(first))
            seconds.append(time.perf_counter() - began)
            steps.write(f"{time.time()}\n")
    (folder / f"result-{rank}.json").write_text(json.dumps({"step": statistics.median(seconds)}))
    # Others may wait for it in a step that is never made.
    os._exit(0)


def _end_if_planned(folder: Path, plan: Plan, rank: int, step: int) -> None:
    loss = loss_at(plan, step, REPLICAS) if step < plan.steps else None
    if loss is None or loss.rank != rank:
        return
    try:
        file = os.open(folder / f"lost-{step}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(file, json.dumps({"time": time.time(), "kind": "kill"}).encode())
    os.kill(os.getpid(), 9)


def read(plan: str) -> Plan:
    """A plan that was written as JSON."""
    return Plan(**{key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(plan).items()})


def main() -> int:
    folder = Path(sys.argv[1])
    if len(sys.argv) == 3:
        return lead(folder, sys.argv[2])
    train(folder, read(sys.argv[2]), int(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
