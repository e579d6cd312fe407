"""The paged step of states on disk, beside what the disk does in a plain loop and what the step costs in memory.

    python benchmarks/offload.py /a/directory
    python benchmarks/offload.py /a/directory --optimizer adamw --layers 48
    python benchmarks/offload.py /a/directory --limit 2GB --layers 320

One rank. In each round, in turn: a paged `optimizer.step()`; the same step in memory; and a plain loop on a file of its
own in the same directory that reads and writes as many bytes, in blocks of the same size, from as many threads. The
plain loop shares no code with the store. Medians over rounds, ratios round by round:

    throughput   the plain loop's time over the paged step's: the share of what the directory does that the step reaches
    exposed      what of the paged step neither the plain loop nor the computing accounts for: step - max of both

Exposed I/O is to be judged where computing takes longer than the disk, which ``--optimizer slow`` is for.

With ``--limit``, nothing is compared: a model is trained for three steps by a process that may take no more memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import statistics
import threading
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import onecopy
from onecopy.planner.quantities import parse_bytes

BLOCK = 4 * 2**20
THREADS = 4
WIDTH = 1024


class Slow(SGD):
    """An update that takes longer to compute than to read and write: many passes over each element."""

    updates_each_element_alone = True
    passes = 200

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moved = parameter.grad.clone()
                    for _ in range(self.passes):
                        moved.mul_(1.01)
                    parameter.add_(moved, alpha=-1e-3)


MAKE = {
    "adamw-fused": lambda parameters: AdamW(parameters, lr=1e-4, fused=True),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-4, foreach=True),
    "adamw-loop": lambda parameters: AdamW(parameters, lr=1e-4, foreach=False),
    "slow": lambda parameters: Slow(parameters, lr=1e-3),
    "sgd": lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
}


class Net(nn.Module):
    """Blocks of one linear layer of a million parameters, each a unit where ``units`` says so."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


class PlainLoop:
    """Blocks of one file read and written by threads that do nothing else."""

    def __init__(self, directory: Path, read_bytes: int, write_bytes: int) -> None:
        self._file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, read_bytes)
        self._reads = [("read", start) for start in range(0, read_bytes, BLOCK)]
        self._writes = [("write", start) for start in range(0, write_bytes, BLOCK)]
        self._memory = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
        self.seconds(self._writes)

    def together(self) -> float:
        """Seconds to read and write, evenly mixed."""
        share = len(self._writes) / len(self._reads)
        mixed, written = [], 0
        for number, read in enumerate(self._reads, start=1):
            mixed.append(read)
            while written < int(number * share):
                mixed.append(self._writes[written])
                written += 1
        return self.seconds(mixed)

    def seconds(self, blocks: Iterable[tuple[str, int]]) -> float:
        left = iter(list(blocks))
        lock = threading.Lock()

        def work(memory: mmap.mmap) -> None:
            while True:
                with lock:
                    block = next(left, None)
                if block is None:
                    return
                call = os.preadv if block[0] == "read" else os.pwritev
                call(self._file, [memory], block[1])

        threads = [threading.Thread(target=work, args=(memory,)) for memory in self._memory]
        began = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return perf_counter() - began


def compare(directory: Path, layers: int, optimizer: str, rounds: int, per_unit: int) -> dict[str, float]:
    """Medians in seconds, and ratios; bytes."""
    units = [nn.Linear] if per_unit == 1 else "auto"
    paged_model = onecopy.shard(Net(layers), 3, units=units, offload=onecopy.Offload(optimizer=directory))
    plain_model = Net(layers)
    paged, plain = (MAKE[optimizer](model.parameters()) for model in (paged_model, plain_model))
    x = torch.randn(4, WIDTH)

    def step(model: nn.Module, own: Optimizer) -> float:
        own.zero_grad()
        model(x).backward()
        began = perf_counter()
        own.step()
        return perf_counter() - began

    for _ in range(2):
        step(paged_model, paged)
        step(plain_model, plain)
    own = onecopy.ledger(paged_model).last_step
    assert own is not None
    read, written = own.bytes_sent("from disk", "step"), own.bytes_sent("to disk", "step")
    loop = PlainLoop(directory, read, written)
    taken: dict[str, list[float]] = {"paged": [], "in memory": [], "plain loop": []}
    for _ in range(rounds):
        taken["paged"].append(step(paged_model, paged))
        taken["in memory"].append(step(plain_model, plain))
        taken["plain loop"].append(loop.together())
    rows = list(zip(*taken.values(), strict=True))
    found = {name: statistics.median(seconds) for name, seconds in taken.items()}
    found["throughput"] = statistics.median(disk / step for step, _, disk in rows)
    found["exposed"] = statistics.median((step - max(disk, compute)) / step for step, compute, disk in rows)
    found["over sum"] = statistics.median(step / (disk + compute) for step, compute, disk in rows)
    found |= {"read bytes": read, "written bytes": written}
    found["pool bytes"] = onecopy.meter(paged_model).live["communication"]
    return found


def demonstrate(directory: Path, layers: int, limit: int) -> dict[str, float]:
    """Train for three steps where the process's data may take no more than ``limit`` bytes."""
    # Freed memory goes back to the system, as with MALLOC_MMAP_THRESHOLD_=65536 in the environment.
    ctypes.CDLL(None).mallopt(-3, 65536)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with torch.device("meta"):
        model = Net(layers)
    where = onecopy.Offload(optimizer=directory, parameters=directory, prefetch=1)
    onecopy.shard(model, 3, units=[nn.Linear], offload=where)
    onecopy.materialize(model)
    optimizer = MAKE["adamw-fused"](model.parameters())
    x = torch.randn(4, WIDTH)
    seconds, losses = [], []
    for _ in range(3):
        began = perf_counter()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(perf_counter() - began)
    return {
        "states": 16.0 * sum(p.numel() for p in model.parameters()),
        "limit": float(limit),
        "resident peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "seconds a step": statistics.median(seconds),
        "first loss": losses[0],
        "last loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where states rest")
    parser.add_argument("--layers", type=int, default=32, help="of a million parameters each")
    parser.add_argument("--optimizer", choices=MAKE, default="adamw-fused")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unit", type=int, choices=(1, 0), default=1, help="1: each layer a unit; 0: as found")
    parser.add_argument("--limit", type=lambda text: int(parse_bytes(text)), help="most bytes of data, e.g. 2GB")
    parser.add_argument("--json", type=Path, help="write what was found here too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.limit is not None:
        found = demonstrate(arguments.directory, arguments.layers, arguments.limit)
    else:
        found = compare(arguments.directory, arguments.layers, arguments.optimizer, arguments.rounds, arguments.unit)
    for name, value in found.items():
        print(f"{name:<16}{value:>18,.4f}" if value < 1e5 else f"{name:<16}{value:>18,.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
