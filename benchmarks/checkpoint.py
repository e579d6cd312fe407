"""Seconds to save and load a training run, and what a save in the background leaves of them in the training loop.

    python benchmarks/checkpoint.py                          # 29.5 M parameters with AdamW's states, stage 3, 2 ranks
    python benchmarks/checkpoint.py --model 3m --ranks 4

Beside it: plain `torch.distributed.checkpoint.save` of the same slices, which checks, syncs and renames nothing beyond
its own files; and `torch.save` of whole weights by one rank. Medians of some repeats; one directory on one disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor

import onecopy
from step_time import SHAPES
from trained.gpt import GPT


def _run(rank: int, ranks: int, stage: int, shape: str, repeats: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = onecopy.shard(GPT(SHAPES[shape]), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(0, SHAPES[shape].vocabulary, (1, 33), generator=torch.Generator().manual_seed(rank))
    _step(model, optimizer, batch)
    directory = Path(folder) / "checkpoints"
    whole = Path(folder) / "whole.pt"
    plain = Path(folder) / "plain"
    savings: list[onecopy.Saving] = []

    def save_in_background() -> None:
        savings.append(onecopy.save(directory, model, optimizer, keep=1, background=True))

    def save_plain() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=plain)

    def save_whole() -> None:
        with onecopy.gathered(model):
            if rank == 0:
                torch.save(model.state_dict(), whole)

    def load_it(*, check: bool) -> None:
        onecopy.load(directory, model, optimizer, check=check)

    rows: list[tuple[str, float]] = [
        ("onecopy.save", _measure(lambda: onecopy.save(directory, model, optimizer, keep=1), repeats)),
        ("onecopy.load", _measure(lambda: load_it(check=True), repeats)),
        ("onecopy.load, check=False", _measure(lambda: load_it(check=False), repeats)),
        ("torch.distributed.checkpoint.save", _measure(save_plain, repeats)),
        ("torch.save of whole weights, no states", _measure(save_whole, repeats)),
        ("a training step", _measure(lambda: _step(model, optimizer, batch), repeats)),
        (
            "onecopy.save, background=True, until it returns",
            _measure(save_in_background, repeats, lambda: savings[-1].wait()),
        ),
    ]
    if rank == 0:
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        print(f"{shape}, stage {stage}, {ranks} ranks: a checkpoint of {size / 1e6:,.0f} MB")
        for name, seconds in rows:
            print(f"{seconds:8.3f} s  {name}")
        print(f"copied by the first rank for a save in the background: {savings[-1].copied / 1e6:,.0f} MB")
    dist.barrier()
    dist.destroy_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch[:, :-1], batch[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _measure(do: Callable[[], object], repeats: int, after: Callable[[], object] = lambda: None) -> float:
    """The median over repeats of the seconds until the slowest rank is done."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = perf_counter()
        do()
        mine = torch.tensor(perf_counter() - start)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        seconds.append(mine.item())
        after()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to be measured; a temporary one if not given")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="onecopy-checkpoint-", dir=options.directory)
    try:
        arguments = (options.ranks, options.stage, options.model, options.repeats, folder)
        mp.start_processes(_run, arguments, nprocs=options.ranks, start_method="spawn")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
