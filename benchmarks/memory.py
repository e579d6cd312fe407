"""Memory: the meter's categories beside ZeRO's formulas, and their sum beside what the kernel says the process held.

    python benchmarks/memory.py --ranks 1 2 4

A GPT of 33.7 M parameters computes in bf16 over fp32 masters with AdamW. malloc maps every larger block by itself, so
that the resident set rises and falls with the tensors. Each case runs alone: two steps to warm up, then one that is
profiled (which adds the activations to the meter) and whose resident peak is taken anew.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onecopy
from cases import SHAPES
from contest import return_freed_memory, status_bytes
from forks import run_ranks
from gpt import GPT, Shape
from onecopy.planner.memory import model_state_bytes

STATES = ("parameters_sliced", "parameters_gathered", "gradients_sliced", "optimizer")
_MIB = 2**20


def trainer(
    rank: int, shape: Shape, stage: int, precision: str, tokens: int
) -> tuple[Callable[[], dict[str, int]], nn.Module]:
    """A step, which returns what the meter counts while gradients are still there, and the model."""
    torch.manual_seed(0)
    net = build(shape)
    model = onecopy.shard(net, stage, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(0, shape.vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(rank))

    def step() -> dict[str, int]:
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        held = dict(onecopy.meter(model).live)
        optimizer.zero_grad()
        return held

    return step, model


def build(shape: Shape) -> GPT:
    """A GPT whose head is its own: of a tied weight autograd holds two gradients while it adds them."""
    net = GPT(shape)
    net.head.weight = nn.Parameter(net.tokens.weight.detach().clone())
    return net


def measure(rank: int, write: Callable[[str], None], stage: int, precision: str, tokens: int) -> None:
    """Write this rank's bytes as a line of JSON."""
    return_freed_memory()
    # Threads, libraries and kernels that any training loads are no system's own.
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    warm = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(dtype)
    warm(torch.ones(2, 64, dtype=dtype)).sum().backward()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    before = status_bytes("RssAnon")
    step, model = trainer(rank, SHAPES["30m"], stage, precision, tokens)
    meter = onecopy.meter(model)
    step()
    step()
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    meter.reset_peaks()
    with onecopy.profile(model):
        held = step()
    # Code and libraries stay mapped once they were used.
    resident = status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem") - before
    dist.barrier()
    write(json.dumps({"held": held, "peak": meter.peak, "resident": resident, "padded": onecopy.padded_numel(model)}))


def line(stage: int, ranks: int, precision: str, found: dict[str, Any], parameters: int) -> str:
    """One row: states held after a step beside the paper's, then the peak and how much of it the meter explains."""
    held, peak = sum(found["held"][name] for name in STATES), sum(found["peak"].values())
    wide = 2 if precision == "fp32" else 0
    paper = model_state_bytes(stage, parameters, ranks, parameter_bytes=2 + wide, gradient_bytes=2 + wide).total
    if wide:
        paper -= 4 * parameters / (1 if stage == 0 else ranks)  # fp32 parameters are their own masters
    return (
        f"{stage:>5}{ranks:>4}{held / _MIB:>12.1f}{paper / _MIB:>11.1f}{held / paper - 1:>+9.1%}"
        f"{peak / _MIB:>12.1f}{found['resident'] / _MIB:>13.1f}{peak / found['resident']:>10.1%}   "
        + " ".join(f"{name} {value / _MIB:.1f}" for name, value in found["peak"].items() if value >= _MIB / 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--precision", choices=["bf16", "bf16-lean", "fp32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=8, help="of the one sample that a rank computes")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(SHAPES["30m"]).parameters())
    heads = ("stage", 5), ("N", 4), ("held MiB", 12), ("paper MiB", 11), ("", 9), ("peak MiB", 12), ("resident", 13)
    print("".join(f"{head:>{width}}" for head, width in heads) + f"{'explained':>10}   at the peak, MiB")
    everything = []
    for ranks in options.ranks:
        for stage in options.stages:
            lines = run_ranks(ranks, measure, stage, options.precision, options.tokens, limit=200.0)
            found = max((json.loads(own[-1]) for own in lines), key=lambda one: one["resident"])
            everything.append({"stage": stage, "ranks": ranks, "precision": options.precision, **found})
            print(line(stage, ranks, options.precision, found, parameters), flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
