# ruff: noqa: E402 (the environment must be set before torch is imported)
"""The size of communication buffers: seconds of a reduce-scatter, by `bucket_bytes`; what the default rests on.

    python benchmarks/bucket_bytes.py --ranks 2 --mib 32

Ranks that read each other's memory, fp32 and bf16, the median of interleaved rounds; N forked ranks, one thread each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
import torch.distributed as dist

from onecopy.comm.mesh import make_mesh
from onecopy.comm.outgoing import Flat
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
from ranks import run_ranks

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def measure(rank: int, ranks: int, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by dtype and buffer size."""
    axes = {size: make_mesh(None, shards=True, ledger=Ledger(), staging=Staging(size)).shard for size in SIZES}
    taken: dict[str, list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.ones((mib << 20) // dtype.itemsize, dtype=dtype)
        out = torch.empty(whole.numel() // ranks)
        for number in range(rounds + 1):
            for size, axis in axes.items():
                dist.barrier()
                start = perf_counter()
                if collective := axis.reduce_scatter(Flat(whole, dtype), out, "", 3):
                    collective.finish()
                if number:
                    taken.setdefault(f"{str(dtype)[6:]} {size >> 10}", []).append(perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=32, help="of the tensor that is reduced")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    results = run_ranks(options.ranks, measure, options.ranks, options.mib, options.rounds, timeout=240)
    print(f"{'dtype':<10}{'buffer, KiB':>12}{'median, ms':>12}{'fastest, ms':>12}")
    for key, seconds in results[0].items():
        dtype, size = key.split()
        print(f"{dtype:<10}{size:>12}{1e3 * statistics.median(seconds):>12.1f}{1e3 * min(seconds):>12.1f}")


if __name__ == "__main__":
    main()
