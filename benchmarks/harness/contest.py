"""A contest: systems that train the same model on the same ranks, and what each of them needs.

Time is taken with all systems in the same processes, each taking one step in turn, so that the machine's ups and downs
meet all alike. Memory and traffic are taken with each system alone in processes of its own (`weighing.py`), for the
resident set tells nothing about one among many. A system that cannot run alone is left out by name. The floor takes its
steps among the others, and nothing else of it is compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from harness.forks import RanksError, read_lines, run_ranks
from harness.process import keep_freed_memory
from harness.systems import System
from harness.weighing import Weighed, weigh_alone
from harness.work import Entrant, Work
from trained.cases import CASES, count


@dataclass(frozen=True)
class Timed:
    """Seconds of each counted step and of the optimizer's part in it, on the slowest rank; and the losses.

    Attributes:
        deviation: the largest share by which a loss differed, on any rank, from that of the first system but the floor.
    """

    seconds: list[float]
    optimizer: list[float]
    losses: list[float]
    deviation: float


@dataclass
class Contest:
    """Everything found for one piece of work.

    Attributes:
        timed: of systems that train.
        floor: of the one that only computes what they all have to; None if it took no part.
    """

    work: Work
    parameters: int
    trainable: int
    timed: dict[str, Timed] = field(default_factory=dict)
    weighed: dict[str, Weighed] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    floor: Timed | None = None

    @property
    def agreeing(self) -> dict[str, Timed]:
        """Times that count: of systems whose losses agree with the first one's."""
        return {name: timed for name, timed in self.timed.items() if timed.deviation <= self.work.tolerance}

    def ratio(self, name: str, peer: str) -> tuple[float, float, float]:
        """Median and quartiles of a system's step time over a peer's, step by step."""
        return _ratio(self.timed[name], self.timed[peer])

    def floor_ratio(self, peer: str) -> tuple[float, float, float] | None:
        """The same of the floor's step time; None if it took no part."""
        return None if self.floor is None else _ratio(self.floor, self.timed[peer])


def _ratio(own: Timed, other: Timed) -> tuple[float, float, float]:
    pairs = [mine / theirs for mine, theirs in zip(own.seconds, other.seconds, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    return middle, low, high


def hold(work: Work, systems: Mapping[str, System], *, weigh: bool, network: bool, limit: float) -> Contest:
    """Run a contest. The caller must run no threads.

    Args:
        systems: by name; losses are held against those of the first but the floor.
        weigh: take memory too, but of the floor; a system that fails at it is left out of the timed steps.
        network: count bytes on the wire while it is weighed; needs root.
        limit: seconds for a system alone, and four times that for all together.
    """
    contest = Contest(work, *count(CASES[work.case]))
    contest.left_out = {name: reason for name, system in systems.items() if (reason := system.obstacle)}
    if weigh:
        for name, system in systems.items():
            if name not in contest.left_out and not system.floor:
                try:
                    contest.weighed[name] = weigh_alone(work, system, network, limit)
                except (RanksError, ProcessException) as error:
                    contest.left_out[name] = str(error).strip().splitlines()[-1]
    remaining = {name: system for name, system in systems.items() if name not in contest.left_out}
    if work.steps > 1 and remaining:
        lines = run_ranks(work.ranks, _time, remaining, work, limit=4 * limit, threads=work.threads, progress=_progress)
        timed = {name: Timed(**one) for name, one in json.loads(lines[0][-1]).items()}
        contest.timed = {name: one for name, one in timed.items() if not systems[name].floor}
        contest.floor = next((one for name, one in timed.items() if systems[name].floor), None)
    return contest


def _progress(folder: Path) -> str:
    lines = read_lines(folder, 0)
    return f"rank 0 at {lines[-1]}" if lines else "nothing begun"


# --- in a rank


def _time(rank: int, write: Callable[[str], None], systems: Mapping[str, System], work: Work) -> None:
    """Write on every rank the seconds of the slowest rank, by system."""
    keep_freed_memory()
    entrants = []
    for name, system in systems.items():
        write(name)
        entrants.append((name, Entrant(system, work, rank)))
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
    expected = losses[next((index for index, system in enumerate(systems.values()) if not system.floor), 0)]
    differ = ((losses - expected).abs() / expected.abs()).amax(1)
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
