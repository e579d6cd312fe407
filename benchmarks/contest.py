"""A contest: systems that train the same model on the same ranks, and what each of them needs.

Time is taken with all systems in the same processes, each taking one step in turn, so that the machine's ups and downs
meet all alike. Memory and traffic are taken with each system alone in processes of its own: the resident set tells
nothing about one among many. A system that cannot run alone is left out by name.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException

import onecopy
from cases import CASES, DTYPES, Batch, count
from forks import RanksError, read_lines, run_ranks
from namespaces import Network, bytes_sent
from onecopy.planner.memory import model_state_bytes
from onecopy.planner.traffic import step_elements
from onecopy.stage import Stage
from systems import Settings, System, Trainer


@dataclass(frozen=True)
class Work:
    """What a step computes, where, and how many of them.

    Attributes:
        samples, size: of one rank in one micro-batch, see `cases.Case`.
        threads: of each rank.
    """

    case: str
    precision: str
    micro_batches: int
    ranks: int
    samples: int
    size: int
    steps: int
    warmup: int
    threads: int = 1

    def __str__(self) -> str:
        return (
            f"{self.case}, {self.ranks} ranks, {self.precision}, g = {self.micro_batches}, "
            f"{self.samples} samples of {self.size} a rank"
        )

    @property
    def tolerance(self) -> float:
        """The share by which losses may differ."""
        return CASES[self.case].tolerance if self.precision == "fp32" else 3e-2


@dataclass(frozen=True)
class Timed:
    """Seconds of each counted step and of the optimizer's part in it, on the slowest rank; and the losses.

    Attributes:
        deviation: the largest share by which a loss differed from the first system's, on any rank.
    """

    seconds: list[float]
    optimizer: list[float]
    losses: list[float]
    deviation: float


@dataclass(frozen=True)
class Weighed:
    """What a system alone needed, in bytes, on the rank that needed most.

    Attributes:
        resident: the resident set's peak in the counted steps, over what it was before the model was made.
        meter: onecopy's own count at its peak, by category; None for other systems.
        formula: model states by ZeRO §5 for fp32 AdamW (K = 8); None in other precisions.
        sent: on the wire in a step, by the kernel's counter; None without namespaces.
        paper: the same by ZeRO §7.
    """

    resident: int
    meter: dict[str, int] | None
    formula: float | None
    sent: float | None
    paper: float


@dataclass
class Contest:
    """Everything found for one piece of work."""

    work: Work
    parameters: int
    trainable: int
    timed: dict[str, Timed] = field(default_factory=dict)
    weighed: dict[str, Weighed] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def agreeing(self) -> dict[str, Timed]:
        """Times that count: of systems whose losses agree with the first one's."""
        return {name: timed for name, timed in self.timed.items() if timed.deviation <= self.work.tolerance}

    def ratio(self, name: str, peer: str) -> tuple[float, float, float]:
        """Median and quartiles of a system's step time over a peer's, step by step."""
        pairs = [own / other for own, other in zip(self.timed[name].seconds, self.timed[peer].seconds, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
        return middle, low, high


def hold(work: Work, systems: Mapping[str, System], *, weigh: bool, network: bool, limit: float) -> Contest:
    """Run a contest. The caller must run no threads.

    Args:
        systems: by name; ratios of losses are to the first.
        weigh: take memory too; a system that fails at it is left out of the timed steps.
        network: count bytes on the wire while it is weighed; needs root.
        limit: seconds for a system alone, and four times that for all together.
    """
    contest = Contest(work, *count(CASES[work.case]))
    contest.left_out = {name: reason for name, system in systems.items() if (reason := system.obstacle)}
    if weigh:
        for name, system in systems.items():
            if name not in contest.left_out:
                try:
                    contest.weighed[name] = _weigh(contest, system, network, limit)
                except (RanksError, ProcessException) as error:
                    contest.left_out[name] = str(error).strip().splitlines()[-1]
    remaining = {name: system for name, system in systems.items() if name not in contest.left_out}
    if work.steps > 1 and remaining:
        lines = run_ranks(work.ranks, _time, remaining, work, limit=4 * limit, threads=work.threads, progress=_progress)
        contest.timed = {name: Timed(**timed) for name, timed in json.loads(lines[0][-1]).items()}
    return contest


def _progress(folder: Path) -> str:
    lines = read_lines(folder, 0)
    return f"rank 0 at {lines[-1]}" if lines else "nothing begun"


def _weigh(contest: Contest, system: System, network: bool, limit: float) -> Weighed:
    work, stage = contest.work, system.stage
    if network:
        with Network(work.ranks) as cables:
            lines = run_ranks(work.ranks, _weigh_rank, system, work, True, limit=limit, network=cables)
    else:
        lines = run_ranks(work.ranks, _weigh_rank, system, work, False, limit=limit, threads=work.threads)
    found = [json.loads(own[-1]) for own in lines]
    # What is frozen does not change, and needs a gather only where whole parameters are let go.
    gathered = contest.parameters if Stage.of(stage).shards_parameters else contest.trainable
    trained = step_elements(stage, contest.trainable, work.ranks, work.micro_batches)
    elements = trained.reduce_scatter + trained.all_reduce
    elements += step_elements(stage, gathered, work.ranks, work.micro_batches).all_gather
    share = contest.trainable / contest.parameters
    states = model_state_bytes(
        *(stage, contest.parameters, work.ranks), parameter_bytes=4, gradient_bytes=4 * share, optimizer_bytes=8 * share
    )
    return Weighed(
        resident=max(one["resident"] for one in found),
        meter=max((one["meter"] for one in found if one["meter"]), key=lambda m: sum(m.values()), default=None),
        formula=states.total if work.precision == "fp32" else None,
        sent=max(one["sent"] for one in found) if network else None,
        paper=elements * DTYPES[work.precision].itemsize,
    )


# --- in a rank


class _Entrant:
    """A system with its own copy of the model and its own, equal, stream of data."""

    def __init__(self, system: System, work: Work, rank: int) -> None:
        case, settings = CASES[work.case], Settings(work.precision, work.micro_batches)
        torch.manual_seed(0)
        self._case, self._work = case, work
        self._generator = torch.Generator().manual_seed(rank)
        self.trainer: Trainer = system.set_up(case.build(), settings)

    def batches(self) -> list[Batch]:
        work = self._work
        drawn = [self._case.draw(self._generator, work.samples, work.size) for _ in range(work.micro_batches)]
        dtype = DTYPES[work.precision]
        return [tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in drawn]


def _time(rank: int, write: Callable[[str], None], systems: Mapping[str, System], work: Work) -> None:
    """Write on every rank the seconds of the slowest rank, by system."""
    _keep_freed_memory()
    entrants = []
    for name, system in systems.items():
        write(name)
        entrants.append((name, _Entrant(system, work, rank)))
    taken: dict[str, list[list[float]]] = {name: [] for name in systems}
    for number in range(work.warmup + work.steps):
        first = number % len(entrants)
        # A different one begins each round: the first pays for what the last one left behind.
        for name, entrant in entrants[first:] + entrants[:first]:
            write(name)
            batches = entrant.batches()
            dist.barrier()
            start = perf_counter()
            step = entrant.trainer.step(batches)
            taken[name].append([perf_counter() - start, step.optimizer, step.loss])
    steps = torch.tensor([taken[name] for name in systems], dtype=torch.float64)
    losses = steps[..., 2].clone()
    differ = ((losses - losses[0]).abs() / losses[0].abs()).amax(1)
    for tensor in (steps, differ):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    answer = {
        name: asdict(
            Timed(
                seconds=steps[index, work.warmup :, 0].tolist(),
                optimizer=steps[index, work.warmup :, 1].tolist(),
                losses=losses[index].tolist(),
                deviation=differ[index].item(),
            )
        )
        for index, name in enumerate(systems)
    }
    write(json.dumps(answer))


def _weigh_rank(rank: int, write: Callable[[str], None], system: System, work: Work, network: bool) -> None:
    importlib.import_module(system.package)
    return_freed_memory()
    # Threads and libraries that any training loads are no system's own.
    nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    before = status_bytes("VmRSS")
    entrant = _Entrant(system, work, rank)
    sharded = entrant.trainer.sharded
    for _ in range(max(1, work.warmup)):
        entrant.trainer.step(entrant.batches())
    gc.collect()
    # Who has passed a barrier has received all it waited for; so all that was sent to it has left.
    dist.barrier()
    sent = bytes_sent() if network else 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    if sharded is not None:
        onecopy.meter(sharded).reset_peaks()
    steps = 2
    for _ in range(steps):
        entrant.trainer.step(entrant.batches())
    peak = status_bytes("VmHWM")
    dist.barrier()
    answer: dict[str, Any] = {
        "resident": peak - before,
        "meter": onecopy.meter(sharded).peak if sharded is not None else None,
        "sent": (bytes_sent() - sent) / steps if network else None,
    }
    write(json.dumps(answer))


_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_MMAP_MAX: Final = -4
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX of <malloc.h>."""


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed, for every system alike, as `onecopy train` does: see docs/performance.md."""
    ctypes.CDLL(None).mallopt(_MMAP_MAX, 0)
    ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Have malloc map every larger block by itself, so that the resident set falls when a tensor is freed."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)


def status_bytes(name: str) -> int:
    """Bytes, from a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {name}")
