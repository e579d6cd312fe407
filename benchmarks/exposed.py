"""python benchmarks/exposed.py: what of the communication shows on GPUs that are not here, by a simulation of time.

The engine and fully_shard run as the first of N ranks on the emulated device (`tests/emulated`), which computes nothing
and writes down what it is asked for; that is played against the planner's durations: a matrix product takes its
operations by the GPU's utilised rate, a copy of the sharding its bytes by the memory's bandwidth, a collective the ring
model's time on the link. Both schedules stand on the same clocks. It needs g++, no GPU, and no memory for the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import onecopy
from onecopy.planner.formulas.time import Link, all_reduce_seconds, gather_seconds
from onecopy.planner.machine.machine import Machine, gpu_of
from trained.llama import SHAPES, Llama, Shape

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / folder) for folder in ("emulated", "support")]

from playback import Asked, Span, spans  # noqa: E402
from rehearse import Mark, rehearse  # noqa: E402

GIB: Final = 2.0**30
LINKS: Final = {"NVLink": None, "400 Gbit": 50e9, "100 Gbit": 12.5e9}
"""Bytes a second that each GPU can send to other nodes; nodes have eight GPUs, and NVLink joins those of one."""

Wrap = Callable[[Llama], nn.Module]
STEPS: Final = 3
"""The first two show the order of units, and make what is kept."""


def _onecopy(stage: int, **settings: Any) -> Wrap:
    return lambda model: onecopy.shard(model, stage, precision="bf16", **settings)


def _fully_shard(*, reshard: bool | None = None, all_units: bool = False) -> Wrap:
    """As PyTorch's documentation has it: every block, and the model; with ``all_units`` embedding and head too."""

    def wrap(model: Llama) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        large = [] if model.head.weight is model.tokens.weight or not all_units else [model.tokens, model.head]
        for block in [*large, *model.blocks]:
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)

    return wrap


SYSTEMS: Final[dict[str, Wrap]] = {
    "onecopy stage 1": _onecopy(1),
    "onecopy stage 2": _onecopy(2),
    "fully_shard, kept": _fully_shard(reshard=False),
    "onecopy stage 3": _onecopy(3),
    "fully_shard": _fully_shard(),
    "fully_shard, all units": _fully_shard(all_units=True),
}


def recorded(wrap: Wrap, shape: Shape, ranks: int, tokens: int) -> list[Asked]:
    """What the device is asked for in `STEPS` steps of one micro-batch."""

    def train(device: torch.device, mark: Mark) -> None:
        with device:
            model = Llama(shape)
            batch = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, tokens, dtype=torch.long)
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        for _ in range(STEPS):
            mark("step")
            wrapped(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        mark("end")

    return rehearse(ranks, train)


def machine_of(ranks: int, link: float | None) -> Machine:
    """So many H100s, eight in a node; all of them in one where no link between nodes is given."""
    return Machine(ranks, gpu_of("h100"), 1 if link is None else max(1, ranks // 8), link or 50e9)


def durations(machine: Machine, hidden: int) -> Callable[[Asked], float]:
    """Seconds of each kernel and collective that runs alone."""
    rate, bandwidth = machine.flops(hidden), machine.gpu.memory_bandwidth
    link = machine.shard_link(machine.gpus)

    def seconds(asked: Asked) -> float:
        if asked.what == "collective":
            return collective_seconds(asked, machine.gpus, link)
        if operations := flops(asked):
            return operations / rate
        if asked.ours or "fused_adam" in asked.name:
            return asked.nbytes / bandwidth
        # What else the model computes is in the utilised rate.
        return 0.0

    return seconds


def collective_seconds(asked: Asked, ranks: int, link: Link) -> float:
    count = all_reduce_seconds if asked.name == "all_reduce" else gather_seconds
    return count(asked.nbytes, ranks, link)


def flops(asked: Asked) -> float:
    """Floating-point operations of a matrix product or an attention, as torch counts them; of other kernels 0."""
    name, shapes = asked.name.removeprefix("aten::"), asked.shapes
    if name in ("mm", "bmm"):
        return 2.0 * prod(shapes[0]) * shapes[1][-1]
    if name == "addmm":
        return 2.0 * prod(shapes[1]) * shapes[2][-1]
    if name.startswith("_scaled_dot_product") and "backward" in name:
        return 10.0 * prod(shapes[1]) * shapes[2][-2]
    if name.startswith("_scaled_dot_product"):
        return 4.0 * prod(shapes[0]) * shapes[1][-2]
    return 0.0


@dataclass(frozen=True)
class Row:
    """One system on one machine; of the last step."""

    model: str
    link: str
    ranks: int
    system: str
    span: Span


def measure(
    models: Sequence[str], ranks: Sequence[int], links: Sequence[str], systems: Sequence[str], tokens: int
) -> Iterator[Row]:
    """Every system on every machine."""
    for model in models:
        for count in ranks:
            for system in systems:
                asked = recorded(SYSTEMS[system], SHAPES[model], count, tokens)
                for name in links:
                    if (LINKS[name] is None) != (count <= 8):
                        continue
                    machine = machine_of(count, LINKS[name])
                    yield Row(model, name, count, system, spans(asked, durations(machine, SHAPES[model].hidden))[-1])


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | link | GPUs | system | step, ms | waits | copies, ms | messages, ms | peak, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.model, list(LINKS).index(row.link), row.ranks)):
        span = row.span
        lines.append(
            f"| {row.model} | {row.link} | {row.ranks} | {row.system} | {1e3 * span.seconds:.1f} "
            f"| {span.exposed / span.seconds:.1%} | {1e3 * span.copying:.1f} | {1e3 * span.messages:.0f} "
            f"| {span.peak / GIB:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 64, 512])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch on each GPU")
    arguments = parser.parse_args()
    rows = measure(arguments.models, arguments.ranks, arguments.links, arguments.systems, arguments.tokens)
    print(table(list(rows)))


if __name__ == "__main__":
    main()
