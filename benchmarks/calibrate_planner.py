"""Hold the planner's memory and time against 1,649 real runs, and fit the constants that no formula gives.

    python benchmarks/calibrate_planner.py

The runs are those behind the Ultra-Scale Playbook's chart (Apache-2.0, see data/README.md): a Llama of 1.34B or 3.57B
parameters, s = 4096, nanotron, 1 to 64 nodes of 8 H100. Used are those that finished without pipeline parallelism; for
time those without tensor parallelism too. Every second run is fitted, and the others are what the errors are taken
from; the times of tensor-parallel runs are predicted without being fitted.

Then the whole planner against speeds of FSDP that others published (llm-foundry, torchtitan): of these only the ratio
of A100 to H100 was fitted (`Gpu.reach`), and nothing of H100's or torchtitan's.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from onecopy.planner.answer.estimate import Estimate, Job, Option, estimate
from onecopy.planner.formulas.activations import IN_PLACE_LOSS_BYTES, LOSS_BYTES
from onecopy.planner.formulas.calibrated import utilisation
from onecopy.planner.formulas.memory import model_state_bytes
from onecopy.planner.formulas.time import all_reduce_seconds, overlap, step_flops
from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.shape import Checkpointing, from_sizes

PUBLISHED = Path(__file__).parent / "data" / "published_fsdp.csv"
RUNS = Path(__file__).parent / "data" / "playbook_runs.csv"
SEQUENCE = 4096


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama with tied embeddings that give the MFU which the runs report for their tokens/s."""

    layers: int
    hidden: int
    parameters: float
    vocabulary: int = 128_256


MODELS = {"1B": Sizes(16, 2048, 1.336e9), "3B": Sizes(28, 3072, 3.565e9)}


@dataclass(frozen=True)
class Run:
    """One row: a model on ``data * tensor`` GPUs; memory in bytes, speed in tokens a second and GPU."""

    model: str
    nodes: int
    micro_batch: int
    micro_batches: int
    data: int
    tensor: int
    stage: int
    memory: float
    speed: float


def read_runs() -> list[Run]:
    """The runs that finished and agree with themselves, without pipeline parallelism, tensor-parallel within a node."""
    rows = list(csv.DictReader(RUNS.open()))
    return [
        Run(
            row["model"],
            *(int(row[key]) for key in ("nodes", "mbs", "gas", "dp", "tp", "zero")),
            # nanotron divides by 1024³, whatever the column is called.
            float(row["mem_gb"]) * 2**30,
            float(row["tok_s_gpu"]),
        )
        for row in rows
        if row["pp"] == "1" and int(row["tp"]) <= 8 and row["mem_gb"] not in ("", "nan") and _agrees(row)
    ]


def _agrees(row: dict[str, str]) -> bool:
    """Whether micro-batch, accumulation and data parallelism make the global batch that the row says."""
    return int(row["mbs"]) * int(row["gas"]) * int(row["dp"]) == int(row["gbs"])


def halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Every second run, and the others."""
    return list(runs[::2]), list(runs[1::2])


def memory_terms(run: Run) -> list[float]:
    """What memory is a sum of: parameters held whole, parameters over the ranks that share optimizer states, copies of
    the hidden state that tensor parallelism leaves whole and that it splits, and logits."""
    sizes = MODELS[run.model]
    own = sizes.parameters / run.tensor
    # The planner's own formula, with weights of one: whole parameters, and what the stage shards.
    sharded = model_state_bytes(run.stage, own, run.data, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=1).total
    hidden = run.micro_batch * SEQUENCE * sizes.hidden * sizes.layers
    logits = run.micro_batch * SEQUENCE * sizes.vocabulary / run.tensor
    return [own, sharded, hidden, hidden / run.tensor, logits]


def fit_memory(runs: Sequence[Run]) -> Any:
    """Weights of `memory_terms` with the least squared relative error."""
    terms = numpy.array([memory_terms(run) for run in runs])
    memory = numpy.array([run.memory for run in runs])
    weights, *_ = numpy.linalg.lstsq(terms / memory[:, None], numpy.ones(len(runs)), rcond=None)
    return weights


@dataclass(frozen=True)
class TimeConstants:
    """See `onecopy.planner.formulas.calibrated`."""

    utilisation: float
    growth: float
    efficiency: float
    crowding: float
    latency: float
    hidden_share: float


def predicted_speed(run: Run, constants: TimeConstants) -> float:
    """Tokens a second and GPU by the planner's formulas."""
    sizes, gpu = MODELS[run.model], GPUS["h100"]
    tokens = run.micro_batch * run.micro_batches * SEQUENCE
    operations = step_flops(sizes.parameters, tokens, layers=sizes.layers, hidden=sizes.hidden, sequence=SEQUENCE)
    machine = Machine(
        run.data * run.tensor,
        gpu,
        nodes=run.nodes,
        latency=constants.latency,
        link_efficiency=constants.efficiency,
        crowding=constants.crowding,
    )
    # What nanotron sends is not documented. The ratio of the two stages' losses says an all-reduce of bf16 gradients at
    # both, and a gather on top at stage 1 (3Ψ, as other systems' stage 1). To `overlap` stage 1's all-reduce is a
    # reduce-scatter of twice the bytes.
    layer = 2 * sizes.parameters / sizes.layers / run.tensor
    buckets = [(layer, layer * (2 if run.stage else 1))] * sizes.layers
    found = overlap(
        run.stage,
        buckets,
        operations / run.tensor / (gpu.peak * utilisation(sizes.hidden, constants.utilisation, constants.growth)),
        shard=run.data,
        micro_batches=run.micro_batches,
        link=machine.shard_link(run.data, run.tensor),
        hidden_share=constants.hidden_share,
    )
    # Two all-reduces of the hidden state in forward and two in backward, as the planner counts them.
    hidden_state = 2 * run.micro_batch * SEQUENCE * sizes.hidden
    messages = 4 * all_reduce_seconds(hidden_state, run.tensor, machine.tensor_link())
    return tokens / (found.total + messages * sizes.layers * run.micro_batches) / run.tensor


def fit_time(runs: Sequence[Run]) -> TimeConstants:
    """Constants with the least sum of absolute logarithmic errors, which one odd run does not sway.

    A random search that always takes the same course.
    """
    generator = random.Random(0)

    def loss(constants: TimeConstants) -> float:
        return sum(abs(math.log(predicted_speed(run, constants) / run.speed)) for run in runs)

    def near(best: TimeConstants, width: float) -> TimeConstants:
        def move(value: float, low: float, high: float) -> float:
            return min(high, max(low, value * math.exp(generator.gauss(0, width))))

        return TimeConstants(
            move(best.utilisation, 0.2, 0.6),
            move(best.growth, 1e-3, 1.0),
            move(best.efficiency, 0.05, 1.0),
            move(best.crowding, 1e-3, 3.0),
            move(best.latency, 1e-7, 3e-5),
            move(best.hidden_share, 0.01, 1.0),
        )

    best = TimeConstants(0.4, 0.2, 0.5, 0.1, 6e-6, 0.5)
    lowest = loss(best)
    for width in (0.5, 0.2, 0.05, 0.01):
        for _ in range(400):
            tried = near(best, width)
            if (found := loss(tried)) < lowest:
                best, lowest = tried, found
    return best


def published() -> list[dict[str, str]]:
    """Rows of published speeds, see data/README.md."""
    return list(csv.DictReader(PUBLISHED.open()))


def planned(row: dict[str, str]) -> Estimate:
    """What the planner says of a published run: FSDP's full sharding is stage 3.

    A100 nodes of llm-foundry have 200 Gbit/s a GPU; of the others 400 Gbit/s are taken.
    """
    layers, hidden, gpus = int(row["layers"]), int(row["hidden"]), int(row["gpus"])
    # The MLP is made as wide as the parameters say, whatever the family.
    wide = round((int(row["parameters"]) - 50_304 * hidden) / layers / hidden / 2 - 2 * hidden)
    shape = from_sizes(layers, hidden, intermediate=wide)
    # llm-foundry's MPT takes flash-attention's cross-entropy, which writes over the logits.
    loss = IN_PLACE_LOSS_BYTES if row["source"] == "llm-foundry" else LOSS_BYTES
    job = Job(shape, int(row["seq"]), "bf16", "fused", loss)
    slow = row["source"] == "llm-foundry" and row["gpu"].startswith("a100")
    machine = Machine(gpus, GPUS[row["gpu"]], max(1, gpus // 8), link=25e9 if slow else 50e9)
    kind: Checkpointing = "units" if row["checkpointing"] == "units" else "off"
    return estimate(job, machine, Option(3, int(row["micro_batch"]), int(row["accumulate"]), kind, "none", gpus))


def speed_ratio(row: dict[str, str], found: Estimate) -> float:
    """Planned over published tokens a second."""
    return found.tokens_per_second / int(row["gpus"]) / float(row["tok_s_gpu"])


def errors(runs: Sequence[Run], predict: Callable[[Run], float], truth: Callable[[Run], float]) -> list[float]:
    """Relative errors, sizes alone, in order."""
    return sorted(abs(predict(run) / truth(run) - 1) for run in runs)


def describe(found: Sequence[float]) -> str:
    """Median, 90th percentile and largest, of how many."""
    ninety = found[min(len(found) - 1, math.ceil(0.9 * len(found)) - 1)]
    return (
        f"median {statistics.median(found):6.1%}   p90 {ninety:6.1%}   largest {found[-1]:6.1%}   of {len(found)} runs"
    )


def main() -> None:
    runs = read_runs()
    fitted, held = halves(runs)
    weights = fit_memory(fitted)
    names = (
        "held whole, bytes a parameter",
        "sharded by stage 1, bytes a parameter",
        "activations, bytes a hidden element",
        "activations split by t, likewise",
        "logits, bytes each",
    )
    print(f"memory, {len(fitted)} runs fitted")
    for name, weight in zip(names, weights, strict=True):
        print(f"  {name:<40}{weight:8.2f}")

    def memory(run: Run) -> float:
        return float(numpy.dot(memory_terms(run), weights))

    print(f"  error on the others   {describe(errors(held, memory, lambda run: run.memory))}")
    for stage in (0, 1):
        some = [run for run in held if run.stage == stage]
        print(f"  stage {stage}               {describe(errors(some, memory, lambda run: run.memory))}")
    plain = [run for run in runs if run.tensor == 1]
    fitted, held = halves(plain)
    constants = fit_time(fitted)
    print(f"time, {len(fitted)} runs fitted\n  {constants}")

    def speed(run: Run) -> float:
        return predicted_speed(run, constants)

    print(f"  error on the others   {describe(errors(held, speed, lambda run: run.speed))}")
    print(f"  {'model':<7}{'stage':<7}{'DP':>5}{'b x g':>9}{'measured':>11}{'predicted':>11}  tokens/s/GPU, not fitted")
    for run in held:
        shape = f"{run.micro_batch} x {run.micro_batches}"
        print(f"  {run.model:<7}{run.stage:<7}{run.data:>5}{shape:>9}{run.speed:>11,.0f}{speed(run):>11,.0f}")
    print("  tensor-parallel runs, none fitted")
    for tensor in (2, 4, 8):
        some = [run for run in runs if run.tensor == tensor]
        ratio = statistics.median(speed(run) / run.speed for run in some)
        print(f"  {tensor} ranks   {describe(errors(some, speed, lambda run: run.speed))}   median ratio {ratio:.2f}")
    print_published()


def print_published() -> None:
    """The planner beside published speeds, by source and GPU."""
    rows = published()
    print("published speeds of FSDP, planned / published")
    for source, gpu in dict.fromkeys((row["source"], row["gpu"]) for row in rows):
        some = [row for row in rows if (row["source"], row["gpu"]) == (source, gpu)]
        estimates = [planned(row) for row in some]
        ratios = [speed_ratio(row, one) for row, one in zip(some, estimates, strict=True)]
        fits = sum(one.fits for one in estimates)
        found = describe(sorted(abs(ratio - 1) for ratio in ratios))
        middle = statistics.median(ratios)
        print(f"  {source:<12}{gpu:<9}{found}   median ratio {middle:.2f}   {fits} said to fit")


if __name__ == "__main__":
    main()
