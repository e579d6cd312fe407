"""Step time of onecopy's stages beside DDP and fully_shard, interleaved in one run.

    python benchmarks/step_time.py --ranks 2 --steps 12

Every contestant holds its own copy of one GPT, gets the same batches, and takes one step in turn, so that the
machine's ups and downs meet all alike. Losses must agree before a time counts. Ratios are taken step by step; medians
are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onecopy
from gpt import GPT, Shape

SHAPES = {
    "3m": Shape(layers=4, hidden=256, heads=4, vocabulary=1024),
    "30m": Shape(),
    "120m": Shape(layers=12, hidden=768, heads=12, vocabulary=32768),
}
CONTESTANTS = ("ddp", "fully_shard", "stage 0", "stage 1", "stage 2", "stage 3")


@dataclass
class Contestant:
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer


def build(name: str, shape: Shape) -> Contestant:
    torch.manual_seed(0)
    model: nn.Module = GPT(shape)
    if name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif name == "fully_shard":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    else:
        onecopy.shard(model, int(name.removeprefix("stage ")))
    return Contestant(name, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def step(contestant: Contestant, batches: list[torch.Tensor]) -> tuple[float, float]:
    """One optimizer step. Returns its seconds and its mean loss over micro-batches."""
    dist.barrier()
    start = perf_counter()
    total = 0.0
    for position, batch in enumerate(batches):
        last = position == len(batches) - 1
        model = contestant.model
        if not last and contestant.name != "fully_shard":
            with model.no_sync():  # type: ignore[operator]
                loss = model(batch[:, :-1], batch[:, 1:]) / len(batches)
                loss.backward()
        else:
            loss = model(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
        total += loss.item()
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()
    return perf_counter() - start, total


def run_rank(rank: int, options: argparse.Namespace, store: str, results: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    shape = SHAPES[options.model]
    contestants = [build(name, shape) for name in options.only or CONTESTANTS]
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(options.steps + options.warmup):
        batches = [
            torch.randint(0, shape.vocabulary, (options.batch, options.length + 1), generator=generator)
            for _ in range(options.accumulate)
        ]
        # A different one begins each round: the first pays for what the last one left behind.
        turn = contestants[number % len(contestants) :] + contestants[: number % len(contestants)]
        losses = {}
        for contestant in turn:
            seconds, losses[contestant.name] = step(contestant, batches)
            slowest = torch.tensor([seconds])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= options.warmup:
                times[contestant.name].append(slowest.item())
        spread = max(losses.values()) - min(losses.values())
        assert spread <= 1e-3, f"losses differ: {losses}"
    if rank == 0:
        with open(results, "w") as file:
            json.dump(times, file)
    dist.barrier()
    dist.destroy_process_group()


def ratios(times: dict[str, list[float]], against: str) -> dict[str, tuple[float, float, float]]:
    """Median and quartiles of each contestant's step time over that of ``against``, step by step."""
    table = {}
    for name, own in times.items():
        pairs = [a / b for a, b in zip(own, times[against], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        table[name] = (middle, low, high)
    return table


def main(launch: Callable[..., object] = mp.spawn) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each contestant")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--batch", type=int, default=2, help="samples a rank in a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS)
    parser.add_argument("--json", help="file for the raw times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results.json")
        launch(run_rank, args=(options, os.path.join(folder, "store"), results), nprocs=options.ranks)
        with open(results) as file:
            times = json.load(file)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "seconds": times}, file, indent=1)
    peers = [peer for peer in ("ddp", "fully_shard") if peer in times]
    print(f"{'':<14}{'median s':>10}" + "".join(f"{'/ ' + peer + ' (quartiles)':>34}" for peer in peers))
    for name, own in times.items():
        cells = "".join(
            f"{middle:>18.3f} ({low:.3f} - {high:.3f})"
            for middle, low, high in (ratios(times, peer)[name] for peer in peers)
        )
        print(f"{name:<14}{statistics.median(own):>10.3f}{cells}")


if __name__ == "__main__":
    main()
