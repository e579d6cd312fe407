"""Hold the planner's memory and time against 1,649 real runs, and fit the constants that no formula gives.

    python benchmarks/calibrate_planner.py

The runs are those behind the Ultra-Scale Playbook's chart (Apache-2.0, see data/README.md): a Llama of 1.34B or 3.57B
parameters, s = 4096, nanotron, 1 to 64 nodes of 8 H100. Used are those that finished without pipeline parallelism; for
time first those without tensor parallelism, and then, these constants fixed, all of them. Every second run is fitted,
and the others are what the errors are taken from. Those on 64 nodes, up to ten times slower than the same on 32, are
not fitted and stand apart.

Then the whole planner against what others published, see `published_runs.py`.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy

from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.formulas.activations import HIDDEN_COPIES, share_of_layer
from onecopy.planner.formulas.calibrated import utilisation
from onecopy.planner.formulas.memory import model_state_bytes
from onecopy.planner.formulas.time import Link, all_reduce_seconds, overlap, step_flops
from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.schedule import Unit
from onecopy.planner.model.shape import Shape, Transformer
from published_runs import describe, live_bytes, print_published

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


def planned_memory(run: Run) -> float:
    """Bytes of live tensors as the planner counts them, nothing of which is fitted on these runs."""
    sizes = MODELS[run.model]
    hidden, layers, table = sizes.hidden, sizes.layers, sizes.vocabulary * sizes.hidden
    # As wide as the parameters say; nothing depends on how they are shared between attention and MLP.
    wide = round(((sizes.parameters - table - hidden) / layers - 4 * hidden**2 - 2 * hidden) / 3 / hidden)
    block = (hidden * hidden,) * 4 + (hidden * wide,) * 3 + (hidden, hidden)
    units = (Unit("", (table, hidden)), *(Unit(f"layers.{i}", block) for i in range(layers)))
    # nanotron gathers what goes into attention and MLP again in backward (`tp_recompute_allgather`, true by default),
    # and each rank keeps 1/t of a layer (Korthikanti et al.). PyTorch's styles, which onecopy takes, keep it whole.
    copies = HIDDEN_COPIES["llama"]
    if run.tensor > 1:
        copies /= run.tensor * share_of_layer(run.tensor, sequence_parallel=True)
    shape = Shape(run.model, units, Transformer(layers, hidden, 32, sizes.vocabulary, copies))
    option = Option(
        run.stage,
        run.micro_batch,
        run.micro_batches,
        "off",
        "none",
        run.data,
        tensor=run.tensor,
        sequence=run.tensor > 1,
    )
    machine = Machine(run.data * run.tensor, GPUS["h100"], nodes=run.nodes)
    return live_bytes(estimate(Job(shape, SEQUENCE), machine, option))


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


@dataclass(frozen=True)
class TensorConstants:
    """See `onecopy.planner.formulas.calibrated`; the first two are seconds of a block."""

    launch: float
    tensor_launch: float
    efficiency: float
    latency: float


NO_FLOOR = TensorConstants(0.0, 0.0, 1.0, 0.0)
"""What the first fit takes, whose runs have no tensor axis."""


def predicted_speed(run: Run, constants: TimeConstants, tensor: TensorConstants = NO_FLOOR) -> float:
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
    compute = operations / run.tensor / (gpu.peak * utilisation(sizes.hidden, constants.utilisation, constants.growth))
    found = overlap(
        run.stage,
        buckets,
        compute,
        shard=run.data,
        micro_batches=run.micro_batches,
        link=machine.shard_link(run.data, run.tensor),
        hidden_share=constants.hidden_share,
    )
    # Two all-reduces of the hidden state in forward and two in backward, as the planner counts them.
    hidden_state = 2 * run.micro_batch * SEQUENCE * sizes.hidden
    link = Link(gpu.intra * tensor.efficiency, tensor.latency)
    messages = 4 * sizes.layers * all_reduce_seconds(hidden_state, run.tensor, link)
    least = sizes.layers * (tensor.tensor_launch if run.tensor > 1 else tensor.launch)
    work = run.micro_batches * max(compute / run.micro_batches + messages, least)
    return tokens / (work + found.exposed) / run.tensor


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


def fit_tensor(runs: Sequence[Run], constants: TimeConstants) -> TensorConstants:
    """Likewise, with the others fixed."""
    generator = random.Random(0)

    def loss(tensor: TensorConstants) -> float:
        return sum(abs(math.log(predicted_speed(run, constants, tensor) / run.speed)) for run in runs)

    best = TensorConstants(5e-4, 4e-3, 0.5, 1e-5)
    lowest = loss(best)
    for width in (0.5, 0.2, 0.05, 0.02):
        for _ in range(300):
            values = [value * math.exp(generator.gauss(0, width)) for value in astuple(best)]
            tried = TensorConstants(values[0], values[1], min(1.0, values[2]), values[3])
            if (found := loss(tried)) < lowest:
                best, lowest = tried, found
    return best


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of two orders of the same things."""
    places = [numpy.argsort(numpy.argsort(values)) for values in (first, second)]
    return float(numpy.corrcoef(*places)[0, 1])


def errors(runs: Sequence[Run], predict: Callable[[Run], float], truth: Callable[[Run], float]) -> list[float]:
    """Relative errors, sizes alone, in order."""
    return sorted(abs(predict(run) / truth(run) - 1) for run in runs)


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
    print("memory by the planner's own figures, none fitted on these runs")
    for tensor in (1, 2, 4, 8):
        some = [run for run in runs if run.tensor == tensor]
        found = describe(errors(some, planned_memory, lambda run: run.memory))
        middle = statistics.median(planned_memory(run) / run.memory for run in some)
        print(f"  {tensor} tensor ranks        {found}   median ratio {middle:.2f}")
    print(f"  all                   {describe(errors(runs, planned_memory, lambda run: run.memory))}")
    plain = [run for run in runs if run.tensor == 1]
    fitted, held = halves(plain)
    constants = fit_time(fitted)
    print(f"time without a tensor axis, {len(fitted)} runs fitted\n  {constants}")
    print(f"  error on the others   {describe(errors(held, lambda r: predicted_speed(r, constants), _measured))}")
    print(f"  {'model':<7}{'stage':<7}{'DP':>5}{'b x g':>9}{'measured':>11}{'predicted':>11}  tokens/s/GPU, not fitted")
    for run in held:
        shape, predicted = f"{run.micro_batch} x {run.micro_batches}", predicted_speed(run, constants)
        print(f"  {run.model:<7}{run.stage:<7}{run.data:>5}{shape:>9}{run.speed:>11,.0f}{predicted:>11,.0f}")
    print_tensor(runs, constants)
    print_published()


def _measured(run: Run) -> float:
    return run.speed


def print_tensor(runs: Sequence[Run], constants: TimeConstants) -> None:
    """All runs up to 32 nodes, half of them fitted, and those on 64."""
    fitted, held = halves([run for run in runs if run.nodes < 64])
    tensor = fit_tensor(fitted, constants)

    def speed(run: Run) -> float:
        return predicted_speed(run, constants, tensor)

    print(f"time with a tensor axis too, {len(fitted)} runs fitted\n  {tensor}")
    print(f"  error on the others   {describe(errors(held, speed, _measured))}")
    apart = [run for run in runs if run.nodes == 64]
    for nodes, some in [(n, [r for r in held if r.nodes == n]) for n in (1, 2, 4, 8, 16, 32)] + [(64, apart)]:
        print(f"  {nodes:>2} nodes              {describe(errors(some, speed, _measured))}", end="")
        for model in MODELS:
            own = [run for run in some if run.model == model]
            if len(own) > 3:
                measured = [run.speed for run in own]
                chosen = max(own, key=speed)
                print(f"   {model} order {rank_correlation([speed(run) for run in own], measured):.2f}", end="")
                print(f" regret {1 - chosen.speed / max(measured):.1%}", end="")
        print()


if __name__ == "__main__":
    main()
