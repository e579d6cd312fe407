"""Weak and strong scaling by the planner's time model, beside runs that were published. No rank runs here.

Weak: every rank has the same samples in a step, whatever N is. Strong: a step has the same samples, shared by N ranks.
The time of a step is `onecopy.planner.answer.estimate`'s: ring collectives, of which half of the computing hides what
it can. `assumptions` lists what goes into it and from where; a GPU has run none of it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Final, Literal

from onecopy.planner.answer.estimate import Estimate, Job, Option, estimate
from onecopy.planner.formulas.calibrated import CROWDING, HIDDEN_SHARE, LATENCY, LINK_EFFICIENCY, utilisation
from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.shape import Shape, from_sizes

RANKS: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NODE: Final = 8
"""GPUs of a node."""

GPU: Final = "h100"
LINK: Final = 50e9
"""Bytes a second that each GPU can send to other nodes: a card of 400 Gbit/s each."""

HYBRID: Final = "stage 3, a copy in each node"
"""Hybrid: 8 slices, and every node holds them."""

TREE: Final = "stage 3, if rounds grew with log2(N)"
"""Shows what the ring's N - 1 rounds cost: NCCL's PAT (arXiv 2506.20252) has log2(N) where messages are small."""

WAYS: Final = {**{f"stage {stage}": stage for stage in range(4)}, HYBRID: 3, TREE: 3}
"""How to train, and the stage of each."""

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Study:
    """A model, how much of it is trained in a step, and who has published measurements of it.

    Attributes:
        sequence: tokens in a sample.
        samples: of one rank in a micro-batch; also in a step of weak scaling.
        batch: samples in a step of strong scaling.
        source: of the model's sizes.
        weak: whether weak scaling is looked at too.
    """

    name: str
    shape: Shape
    sequence: int
    samples: int
    batch: int
    source: str
    weak: bool = True


STUDIES: Final = (
    Study(
        *("1.5B", from_sizes(48, 1600, heads=25), 1024, 8, 4096),
        source="GPT-2 XL: 48 layers, hidden 1600, 1,024 tokens (ZeRO §3.2)",
    ),
    Study(
        *("7.5B", from_sizes(36, 4096, heads=32, vocabulary=51_200), 2048, 4, 2048),
        source="36 layers, hidden 4096, 2,048 tokens (Narayanan et al., SC 2021, Table 1)",
    ),
    Study(
        *("1.3B", from_sizes(16, 2048, heads=32, vocabulary=128_256, intermediate=12_288), 4096, 1, 256),
        source="the Ultra-Scale Playbook's Llama of 16 layers, hidden 2048, 4,096 tokens, 256 samples in a step",
        weak=False,
    ),
)


@dataclass(frozen=True)
class Projected:
    """One way on N ranks.

    Attributes:
        micro_batch, micro_batches: b and g of one rank.
        seconds, exposed: of a step, and those of them in which a rank waits for messages.
        speed: tokens a second and GPU.
        efficiency: its share of the speed that the same way has on one node.
        peak: bytes of a rank, by the planner.
        fits: whether the GPU has them.
    """

    model: str
    scaling: Scaling
    way: str
    ranks: int
    micro_batch: int
    micro_batches: int
    seconds: float
    exposed: float
    speed: float
    efficiency: float
    peak: float
    fits: bool


@dataclass(frozen=True)
class Published:
    """A measurement of another system: tokens a second and GPU, and what the planner says for the same run."""

    model: str
    way: str
    ranks: int
    speed: float
    projected: float
    source: str


def project(study: Study, scaling: Scaling) -> list[Projected]:
    """All ways on all sizes. Strong scaling ends where a rank would have less than a sample."""
    found = []
    for way in WAYS:
        first = None
        for ranks in RANKS:
            samples = study.samples if scaling == "weak" else study.batch // ranks
            if samples < 1:
                break
            micro_batch = min(samples, study.samples)
            option = _option(way, ranks, micro_batch, samples // micro_batch)
            made = _estimate(study, _machine(ranks, tree=way == TREE), option)
            speed = made.tokens_per_second / ranks
            first = first or speed
            found.append(_projected(study.name, scaling, way, ranks, made, speed, speed / first))
    return found


def everything() -> list[Projected]:
    """All studies."""
    return [
        point
        for study in STUDIES
        for scaling in (("weak", "strong") if study.weak else ("strong",))
        for point in project(study, scaling)
    ]


def published() -> list[Published]:
    """Runs of others, of models above or alike: data parallelism alone, one sample a micro-batch.

    Sources: `data/README.md`; and a table of DeepSpeed 0.14.2 with LLaMA-7B, 64 samples of 4,096 tokens in a step.
    """
    runs = Path(__file__).parent.parent / "data" / "playbook_runs.csv"
    rows = [row for row in csv.DictReader(runs.open()) if row["tok_s_gpu"] not in ("", "nan")]
    study = STUDIES[2]
    found = []
    for row in rows:
        if (row["model"], row["mbs"], row["pp"], row["tp"]) != ("1B", "1", "1", "1"):
            continue
        way, ranks = f"stage {row['zero']}", int(row["dp"])
        option = _option(way, ranks, 1, study.batch // ranks)
        made = _estimate(study, _machine(ranks), option)
        speed = float(row["tok_s_gpu"])
        found.append(
            Published(study.name, way, ranks, speed, made.tokens_per_second / ranks, "Ultra-Scale Playbook, nanotron")
        )
    # 32 layers, hidden 4096, a gated MLP of 11008 (Touvron et al., arXiv 2302.13971): three matrices, here as two.
    llama = from_sizes(32, 4096, heads=32, vocabulary=64_000, intermediate=16_512)
    for way, micro_batch, samples_per_second in (("stage 2", 1, 5.33), ("stage 3", 2, 4.95)):
        made = estimate(
            Job(llama, 4096), Machine(8, GPUS["a800"]), _option(way, 8, micro_batch, 64 // 8 // micro_batch)
        )
        found.append(
            Published(
                *("LLaMA-7B, 8 A800", way, 8, samples_per_second * 4096 / 8, made.tokens_per_second / 8),
                source="gist chenyaofo/d4cd6a20, DeepSpeed 0.14.2",
            )
        )
    return found


def assumptions() -> list[tuple[str, str, str]]:
    """What the projections rest on: what, its value, and its source."""
    gpu = GPUS[GPU]
    return [
        ("GPU", f"H100: {gpu.memory / 1e9:.0f} GB, {gpu.peak / 1e12:.0f} TFLOP/s dense bf16", "data sheet"),
        ("nodes", f"{NODE} GPUs, {gpu.intra / 1e9:.0f} GB/s each way between them", "data sheet (NVLink)"),
        ("between nodes", f"{LINK / 1e9:.0f} GB/s for each GPU", "a 400 Gbit/s card each"),
        (
            "computing",
            f"6Ψ operations a token and attention's; {utilisation(1600):.3f}, {utilisation(2048):.3f} and "
            f"{utilisation(4096):.3f} of the peak for hidden 1600, 2048 and 4096",
            "fitted on the playbook's runs (benchmarks/calibrate_planner.py)",
        ),
        (
            "a collective",
            "ring: (N-1)(α + S/(N·bw)) for each unit; over all cards of a node at once, between nodes",
            "the field's model; NCCL takes fewer rounds on many nodes: trees for all-reduces, PAT for gathers "
            "(arXiv 2506.20252)",
        ),
        ("α", f"{LATENCY * 1e6:.0f} µs a round", "fitted, likewise; NCCL alone takes about 6 µs"),
        ("links amid training", f"{LINK_EFFICIENCY:.3f} of the data sheet's", "fitted, likewise"),
        ("crowding", f"1 / (1 + {CROWDING:.3f} · log2(nodes))", "fitted, likewise, on 1 to 32 nodes; no data beyond"),
        ("what hides", f"messages hide behind {HIDDEN_SHARE:.0%} of computing", "an assumption; the fit hides 2 %"),
        ("optimizer's step", "28 bytes a parameter of the slice at memory bandwidth", "fused AdamW in fp32"),
        ("precision", "bf16 parameters and gradients on the wire, fp32 masters", "onecopy's precision='bf16'"),
        ("not in it", "loading data, stragglers, failures, other jobs on the network", ""),
    ]


def _machine(ranks: int, tree: bool = False) -> Machine:
    latency = LATENCY * log2(ranks) / (ranks - 1) if tree else LATENCY
    return Machine(ranks, GPUS[GPU], nodes=max(1, ranks // NODE), link=LINK, latency=latency)


def _estimate(study: Study, machine: Machine, option: Option) -> Estimate:
    return estimate(Job(study.shape, study.sequence, implementation="fused"), machine, option)


def _option(way: str, ranks: int, micro_batch: int, micro_batches: int) -> Option:
    shard = NODE if way == HYBRID else ranks
    return Option(WAYS[way], micro_batch, micro_batches, "off", "none", shard, ranks // shard)


def _projected(
    model: str, scaling: Scaling, way: str, ranks: int, made: Estimate, speed: float, efficiency: float
) -> Projected:
    option = made.option
    return Projected(
        *(model, scaling, way, ranks, option.micro_batch, option.accumulate, made.seconds.total, made.seconds.exposed),
        *(speed, efficiency, made.peak, made.fits),
    )
