"""The planner beside runs that others published: speeds of FSDP, and speeds and memory of DeepSpeed.

    python benchmarks/published_runs.py

See data/README.md for the sources. Three things were fitted on llm-foundry's runs: how much of its peak an A100 reaches
beside an H100 (`Gpu.reach`), the allocator's slack (A100 of 40 GB), and the share of computing that hides messages
(H100). Nothing was fitted on the others.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from onecopy.planner.answer.estimate import OFFLOADS, Estimate, Job, Option, estimate
from onecopy.planner.formulas.activations import HIDDEN_COPIES, IN_PLACE_LOSS_BYTES, LOSS_BYTES
from onecopy.planner.formulas.buffers import ALLOCATOR_SLACK, CUDA_CONTEXT_BYTES
from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.schedule import Unit
from onecopy.planner.model.shape import CHECKPOINTING, Shape, Transformer, from_sizes

DATA = Path(__file__).parent / "data"

WITHOUT_DROPOUT = 32 / 2
"""Copies of the hidden state that an MPT block keeps: of Korthikanti's 34sbh two are masks of dropout; it has none."""

_LLAMAS = {
    # layers, hidden, intermediate, heads, key and value heads; 32,000 tokens
    "llama2-7b": (32, 4096, 11_008, 32, 32),
    "llama2-13b": (40, 5120, 13_824, 40, 40),
    "codellama-34b": (48, 8192, 22_016, 64, 8),
    "llama2-70b": (80, 8192, 28_672, 64, 8),
}


@dataclass(frozen=True)
class Published:
    """A run, and what the planner says of it.

    Attributes:
        source: whose.
        gpu: kind.
        speed: tokens a second and GPU.
        memory: the most bytes of live tensors; None where it was not published.
        found: the plan.
        offloads: something rests on the host.
        setting: model, machine and batch, in which there may be other options.
    """

    source: str
    gpu: str
    speed: float
    memory: float | None
    found: Estimate
    offloads: bool
    setting: tuple[str, ...]

    @property
    def planned_speed(self) -> float:
        """Tokens a second and GPU."""
        option = self.found.option
        return self.found.tokens_per_second / (option.shard * option.replicate * option.tensor)

    @property
    def ratio(self) -> float:
        """Planned over published speed."""
        return self.planned_speed / self.speed

    @property
    def memory_ratio(self) -> float | None:
        """Planned over published bytes of live tensors, without the driver's and the allocator's share."""
        if self.memory is None:
            return None
        return live_bytes(self.found) / self.memory


def live_bytes(found: Estimate) -> float:
    """Of tensors at the highest moment, without the driver's and the allocator's share."""
    return (found.peak - CUDA_CONTEXT_BYTES) / (1 + ALLOCATOR_SLACK)


def published() -> list[Published]:
    """All of them; FSDP's full sharding is stage 3."""
    return [_of_table(row) for row in _rows("published_fsdp.csv")] + [
        _of_llama(row) for row in _rows("published_llama.csv")
    ]


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / name).open()))


def _of_table(row: dict[str, str]) -> Published:
    """A row of llm-foundry or torchtitan.

    A100 nodes of llm-foundry have 200 Gbit/s a GPU; of the others 400 Gbit/s are taken.
    """
    layers, hidden, gpus = int(row["layers"]), int(row["hidden"]), int(row["gpus"])
    # The MLP is made as wide as the parameters say, whatever the family.
    wide = round((int(row["parameters"]) - 50_304 * hidden) / layers / hidden / 2 - 2 * hidden)
    shape, foundry = from_sizes(layers, hidden, intermediate=wide), row["source"] == "llm-foundry"
    assert shape.transformer is not None
    copies = WITHOUT_DROPOUT if foundry else HIDDEN_COPIES["llama"]
    shape = replace(shape, transformer=replace(shape.transformer, copies=copies))
    # llm-foundry's MPT takes flash-attention's cross-entropy, which writes over the logits.
    job = Job(shape, int(row["seq"]), "bf16", "fused", IN_PLACE_LOSS_BYTES if foundry else LOSS_BYTES)
    slow = foundry and row["gpu"].startswith("a100")
    machine = Machine(gpus, GPUS[row["gpu"]], max(1, gpus // 8), link=25e9 if slow else 50e9)
    option = Option(3, int(row["micro_batch"]), int(row["accumulate"]), _kind(row), "none", gpus)
    setting = (row["source"], row["gpu"], row["gpus"], row["model"], row["seq"])
    found = estimate(job, machine, option)
    return Published(row["source"], row["gpu"], float(row["tok_s_gpu"]), None, found, False, setting)


def _of_llama(row: dict[str, str]) -> Published:
    """A row of IBM's, of the FSDP paper's, or of the table on A800."""
    gpus, shard = int(row["gpus"]), int(row["shard"])
    nodes = max(1, gpus // 8)
    link = float(row["node_gbyte"]) * 1e9 / 8 if nodes > 1 else 50e9
    offload = next(kind for kind in OFFLOADS if kind == row["offload"])
    option = Option(
        int(row["stage"]), int(row["micro_batch"]), int(row["accumulate"]), _kind(row), offload, shard, gpus // shard
    )
    job = Job(_shape(row["model"]), int(row["seq"]))
    batch = str(option.micro_batch * option.accumulate)
    return Published(
        row["source"],
        row["gpu"],
        float(row["tok_s_gpu"]),
        float(row["mem_gb"]) * 1e9 if row["mem_gb"] else None,
        estimate(job, Machine(gpus, GPUS[row["gpu"]], nodes, link=link), option),
        offload != "none",
        (row["source"], row["gpu"], row["gpus"], row["model"], batch),
    )


def _kind(row: dict[str, str]) -> str:
    return next(kind for kind in CHECKPOINTING if kind == row["checkpointing"])


def _shape(name: str) -> Shape:
    if name == "gpt-175b":
        return from_sizes(96, 12_288, heads=96, vocabulary=50_000)
    layers, hidden, wide, heads, pairs = _LLAMAS[name]
    narrow, table = hidden * hidden * pairs // heads, 32_000 * hidden
    matrices = (hidden * hidden,) * 2 + (narrow,) * 2 + (hidden * wide,) * 3
    block = (*matrices, hidden, hidden)
    units = (Unit("", (table, table, hidden)), *(Unit(f"layers.{i}", block) for i in range(layers)))
    return Shape(name, units, Transformer(layers, hidden, heads, 32_000, HIDDEN_COPIES["llama"], idle=table))


def describe(found: Iterable[float]) -> str:
    """Median, 90th percentile and largest of relative errors, of how many."""
    errors = sorted(found)
    return (
        f"median {statistics.median(errors):6.1%}   p90 {ninety(errors):6.1%}   largest {errors[-1]:6.1%}   "
        f"of {len(errors)} runs"
    )


def ninety(errors: Sequence[float]) -> float:
    """The 90th percentile of sorted numbers."""
    return errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]


def regret(runs: Sequence[Published]) -> list[float]:
    """For each setting with several options: how much slower than the best one the one that the planner prefers is."""
    found = []
    for _, group in groupby(sorted(runs, key=lambda run: run.setting), key=lambda run: run.setting):
        options = list(group)
        if len(options) > 1:
            chosen = max(options, key=lambda run: run.planned_speed)
            found.append(1 - chosen.speed / max(run.speed for run in options))
    return found


def print_published() -> None:
    """By source and GPU."""
    runs = published()
    print("published runs, planned / published")
    for key in dict.fromkeys((run.source, run.gpu, run.offloads) for run in runs):
        some = [run for run in runs if (run.source, run.gpu, run.offloads) == key]
        name = f"{key[0]}{', offload' if key[2] else ''}"
        middle = statistics.median(run.ratio for run in some)
        fits = sum(run.found.fits for run in some)
        print(f"  {name:<16}{key[1]:<9}time    {describe(abs(run.ratio - 1) for run in some)}", end="")
        print(f"   median ratio {middle:.2f}   {fits} said to fit")
        if memory := [run.memory_ratio for run in some if run.memory_ratio is not None]:
            middle = statistics.median(memory)
            print(f"  {'':<25}memory  {describe(abs(ratio - 1) for ratio in memory)}   median ratio {middle:.2f}")
    found = regret([run for run in runs if not run.offloads])
    print(f"  regret of the option that the planner takes for the fastest: mean {statistics.mean(found):.1%}", end="")
    print(f", largest {max(found):.1%}, of {len(found)} settings with several options")


if __name__ == "__main__":
    print_published()
