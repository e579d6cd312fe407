"""The tuner's bars: how near it comes to the best of a measured space, and how far the planner is off.

    python benchmarks/tuning.py --measure                 # some 10 minutes: every setting of three models, into data/
    python benchmarks/tuning.py --search                  # some 2 minutes: ten searches on what is stored, each model
    python benchmarks/tuning.py --search --peers          # beside optuna's samplers and random order
    python benchmarks/tuning.py --live gpt-3m             # one search by real probes, beside the stored best

``--measure`` probes every setting of a reduced space of each model under a limit of memory that some of them do not
have, and writes `data/tuning.json`. ``--search`` lets the tuner search that space ten times: a probe's answer is drawn
from the stored steps, with replacement, so that each repetition sees other noise. A search that has not ended by itself
is cut after 8 probes. Counted is by how much the median of all stored steps of the setting that it found exceeds the
best one's.

The planner's error is that on settings that the search has not probed: with its constants as they were, and as the
probes have corrected them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from onecopy.planner.machine.calibration import Calibration
from onecopy.planner.machine.here import look
from onecopy.planner.machine.machine import Gpu, Machine
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.expectation import Expectation
from onecopy.tuner.outcome import Outcome, outcome_of
from onecopy.tuner.probe.crew import Local
from onecopy.tuner.probe.order import Length, Limits
from onecopy.tuner.search import Search
from onecopy.tuner.space import Space
from onecopy.tuner.workload import OwnLoop
from trained.cases import CASES

DATA: Final = Path(__file__).parent / "data" / "tuning.json"
RANKS: Final = 2
PROBES: Final = 8
REPETITIONS: Final = 10
ROUNDS: Final = 2


@dataclass(frozen=True)
class Problem:
    """One model and its space.

    Attributes:
        size: tokens of a text, pixels along a side.
        global_batch: samples in a step.
        limit: bytes of a rank's process, of which some settings need more.
    """

    case: str
    size: int
    global_batch: int
    limit: int
    space: Space


_HALF_FORTY: Final = Space(micro_batch=(1, 2, 4, 8, 16), prefetch=(1,))
PROBLEMS: Final = (
    Problem("gpt-3m", 64, 32, 400_000_000, _HALF_FORTY),
    Problem("gpt-30m", 16, 32, 840_000_000, _HALF_FORTY),
    Problem("resnet50", 64, 16, 730_000_000, Space(micro_batch=(2, 4, 8), prefetch=(1, 2))),
)


def build(case: str) -> nn.Module:
    return CASES[case].build()


def batch(case: str, size: int, samples: int) -> tuple[torch.Tensor, ...]:
    return CASES[case].draw(torch.Generator().manual_seed(torch.initial_seed()), samples, size)


def workload(problem: Problem) -> OwnLoop:
    """What is tuned."""
    return OwnLoop(partial(build, problem.case), partial(batch, problem.case, problem.size))


# --- measuring


def measure(problems: list[Problem], seconds: float, most: int | None, *, provisional: bool) -> None:
    """Probe every setting, in rounds of their own order of chance, so that what drifts falls on all alike."""
    stored = json.loads(DATA.read_text()) if DATA.exists() else {"models": {}}
    machine, words = look(RANKS)
    print(words, flush=True)
    for problem in problems:
        chosen = problem.space.candidates(RANKS, problem.global_batch)[:most]
        found: dict[Candidate, Outcome] = {}
        began = time.monotonic()
        with Local(workload(problem), RANKS, "cpu") as crew:
            for seed in range(ROUNDS):
                for candidate in random.Random(seed).sample(chosen, len(chosen)):
                    if candidate in found and found[candidate].timed is None:
                        continue
                    outcome = _probe(crew, candidate, problem, Length(seconds / ROUNDS, least=3, most=10))
                    found[candidate] = found[candidate].with_more(outcome) if candidate in found else outcome
                    print(f"{problem.case} {seed + 1}/{ROUNDS}: {candidate.words()}: {outcome.words()}", flush=True)
        rows = [{"candidate": one.as_dict(), "outcome": known.as_dict()} for one, known in found.items()]
        stored["models"][problem.case] = {
            "size": problem.size,
            "global_batch": problem.global_batch,
            "limit": problem.limit,
            "seconds": time.monotonic() - began,
            "provisional": provisional,
            "machine": asdict(machine) | {"gpu": machine.gpu._asdict()},
            "system": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "settings": sorted(rows, key=lambda row: json.dumps(row["candidate"])),
        }
        DATA.write_text(json.dumps(stored, indent=1) + "\n")


def _probe(crew: Local, candidate: Candidate, problem: Problem, length: Length) -> Outcome:
    limits, start = Limits(problem.limit, silence=60.0, seconds=120.0), time.monotonic()
    reports = crew.probe(candidate, length, limits)
    return replace(outcome_of(reports, limits, time.monotonic() - start), traceback="")


# --- stored data


@dataclass(frozen=True)
class Stored:
    """A measured space."""

    problem: Problem
    machine: Machine
    outcomes: dict[Candidate, Outcome]
    provisional: bool

    @property
    def best(self) -> float:
        """Seconds of the fastest setting."""
        return min(self.seconds(one) for one in self.outcomes)

    def seconds(self, candidate: Candidate) -> float:
        """The median over all stored steps; infinite for what did not run."""
        timed = self.outcomes[candidate].timed
        return math.inf if timed is None else timed.seconds

    def draw(self, candidate: Candidate, chance: random.Random) -> Outcome:
        """A probe's answer: of the stored steps after warm-up, as many as a probe takes by itself."""
        known = self.outcomes[candidate]
        if (timed := known.timed) is None:
            return known
        steps = known.steps[timed.warmup :]
        usual = Length()
        taken = min(usual.most, max(usual.least, math.ceil(usual.seconds / timed.seconds)))
        return replace(known, steps=(known.steps[0], *(chance.choice(steps) for _ in range(taken))))


def stored(path: Path = DATA) -> Iterator[Stored]:
    """What `data/tuning.json` holds."""
    models = json.loads(path.read_text())["models"]
    for problem in PROBLEMS:
        if problem.case in models:
            values = models[problem.case]
            machine = Machine(**values["machine"] | {"gpu": Gpu(**values["machine"]["gpu"])})
            outcomes = {
                Candidate.from_dict(row["candidate"]): Outcome.from_dict(row["outcome"]) for row in values["settings"]
            }
            yield Stored(replace(problem, limit=values["limit"]), machine, outcomes, values["provisional"])


@dataclass(frozen=True)
class Found:
    """One search on stored data.

    Attributes:
        probes: that it took, failing ones included.
        excess: by which its setting is slower than the best one.
        by_itself: whether it ended before it was cut.
        time_errors, byte_errors: of settings that were not probed, before and after calibration.
    """

    probes: int
    excess: float
    by_itself: bool
    time_errors: tuple[list[float], list[float]] = ([], [])
    byte_errors: tuple[list[float], list[float]] = ([], [])


def replay(data: Stored, expectation: Expectation, seed: int, probes: int = PROBES) -> Found:
    """One search by the tuner."""
    chance = random.Random(seed)
    search = Search(list(data.outcomes), expectation, limit=data.problem.limit)
    while search.probes < probes and (candidate := search.next()) is not None:
        search.add(candidate, data.draw(candidate, chance))
    best = search.best
    excess = math.inf if best is None else data.seconds(best) / data.best - 1
    return Found(search.probes, excess, bool(search.ended), *_errors(data, search, expectation))


def _errors(data: Stored, search: Search, expectation: Expectation) -> Any:
    held_out = [one for one, known in data.outcomes.items() if one not in search.tried and known.kind == "measured"]
    plain = replace(Calibration(), base=float(max(known.base for known in data.outcomes.values())))
    seconds = [data.seconds(one) for one in held_out]
    peaks = [data.outcomes[one].peak for one in held_out]
    before = [expectation.seconds(one, plain) for one in held_out]
    after = [math.exp(one.mean) for one in search.expected_seconds(held_out)]
    bytes_before = [expectation.memory(one, plain) for one in held_out]
    bytes_after = [math.exp(one.mean) for one in search.expected_bytes(held_out)]
    return (
        (_off(before, seconds), _off(after, seconds)),
        (_off(bytes_before, peaks), _off(bytes_after, peaks)),
    )


def _off(planned: list[float], measured: list[Any]) -> list[float]:
    return [abs(p / m - 1) for p, m in zip(planned, measured, strict=True)]


def search_stored(peers: bool) -> None:
    """Ten searches on each stored space."""
    for data in stored():
        kinds = [known.kind for known in data.outcomes.values()]
        print(
            f"\n{data.problem.case}: {len(kinds)} settings, {kinds.count('out of memory')} out of memory at "
            f"{data.problem.limit / 1e6:.0f} MB, best {data.best * 1e3:.1f} ms"
            f"{'; PROVISIONAL data of a loaded machine' if data.provisional else ''}"
        )
        expectation = Expectation(workload(data.problem), data.machine)
        runs = [replay(data, expectation, seed) for seed in range(REPETITIONS)]
        _print_runs("onecopy", runs)
        for what, errors in (("time", [r.time_errors for r in runs]), ("memory", [r.byte_errors for r in runs])):
            before, after = (statistics.median(e for pair in errors for e in pair[k]) for k in (0, 1))
            print(f"  planner's median error on held-out settings, {what}: {before:.1%} before, {after:.1%} after")
        if peers:
            for name, run in PEERS.items():
                _print_runs(name, [run(data, seed) for seed in range(REPETITIONS)])


def _print_runs(name: str, runs: list[Found]) -> None:
    near = sum(run.excess <= 0.03 for run in runs)
    excesses = sorted(run.excess for run in runs)
    probes = statistics.mean(run.probes for run in runs)
    print(
        f"  {name}: within 3 % in {near} of {len(runs)}; median {statistics.median(excesses):.1%}, worst "
        f"{excesses[-1]:.1%}; {probes:.1f} probes, {sum(run.by_itself for run in runs)} ended by themselves",
        flush=True,
    )


# --- peers


def random_order(data: Stored, seed: int) -> Found:
    """As many settings, drawn by chance."""
    chance = random.Random(seed)
    drawn = chance.sample(list(data.outcomes), PROBES)
    return Found(PROBES, min(data.seconds(one) for one in drawn) / data.best - 1, False)


def with_optuna(sampler: str, data: Stored, seed: int) -> Found:
    """Optuna over the same settings: each one's parts are categories; what runs out is a pruned trial."""
    optuna: Any = __import__("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chance = random.Random(seed)
    names = ("stage", "micro_batch", "checkpointing", "prefetch")
    values = {name: sorted({getattr(one, name) for one in data.outcomes}) for name in names}
    by_parts = {tuple(getattr(one, name) for name in names): one for one in data.outcomes}
    made = {
        "TPE": partial(optuna.samplers.TPESampler, n_startup_trials=3, multivariate=True),
        "GP": partial(optuna.samplers.GPSampler, n_startup_trials=3),
    }[sampler]
    study = optuna.create_study(sampler=made(seed=seed))
    tried: dict[Candidate, float] = {}
    while len(tried) < PROBES:
        trial = study.ask()
        parts = tuple(trial.suggest_categorical(name, values[name]) for name in names)
        # Stage 0 gathers nothing ahead.
        candidate = by_parts.get(parts) or by_parts[(*parts[:-1], 1)]
        known = data.draw(candidate, chance)
        if known.timed is None:
            tried[candidate] = math.inf
            # Twice the slowest so far: a failed trial teaches these samplers nothing.
            study.tell(trial, 2 * max([t for t in tried.values() if t < math.inf], default=10.0))
        else:
            tried[candidate] = known.timed.seconds
            study.tell(trial, known.timed.seconds)
        if len(study.trials) > 10 * PROBES:
            break
    best = min(tried, key=tried.__getitem__)
    return Found(len(tried), data.seconds(best) / data.best - 1, False)


PEERS: Final[dict[str, Callable[[Stored, int], Found]]] = {
    "random order": random_order,
    "optuna, TPE": partial(with_optuna, "TPE"),
    "optuna, Gaussian process": partial(with_optuna, "GP"),
}


def live(case: str) -> None:
    """One search by real probes."""
    data = next(one for one in stored() if one.problem.case == case)
    expectation = Expectation(workload(data.problem), data.machine)
    search = Search(list(data.outcomes), expectation, limit=data.problem.limit)
    with Local(workload(data.problem), RANKS, "cpu") as crew:
        while search.probes < PROBES and (candidate := search.next()) is not None:
            outcome = _probe(crew, candidate, data.problem, Length())
            search.add(candidate, outcome)
            print(f"{search.probes}: {candidate.words()}: {outcome.words()}", flush=True)
    assert search.best is not None
    print(
        f"{search.ended or 'cut'}: {search.best.words()}, {data.seconds(search.best) / data.best - 1:.1%} slower than "
        f"the best stored setting by its stored steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="probe every setting, and store it")
    parser.add_argument("--search", action="store_true", help="search what is stored")
    parser.add_argument("--peers", action="store_true", help="beside other ways to search (optuna, if installed)")
    parser.add_argument("--live", metavar="CASE", help="one search by real probes")
    parser.add_argument("--only", nargs="+", choices=[one.case for one in PROBLEMS], help="these models")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps for each setting")
    parser.add_argument("--most", type=int, help="settings of each model, to see that it works")
    parser.add_argument("--provisional", action="store_true", help="mark the data as that of a loaded machine")
    chosen = parser.parse_args()
    if not (chosen.measure or chosen.search or chosen.live):
        parser.print_help()
        sys.exit(2)
    if chosen.measure:
        wanted = [one for one in PROBLEMS if not chosen.only or one.case in chosen.only]
        measure(wanted, chosen.seconds, chosen.most, provisional=chosen.provisional)
    if chosen.search:
        search_stored(chosen.peers)
    if chosen.live:
        live(chosen.live)


if __name__ == "__main__":
    main()
