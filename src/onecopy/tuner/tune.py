"""Tune: the call. It plans, probes, learns and stops, keeps a journal, and hands back what was found.

With ranks that torchrun or Ray has started, every one of them makes the same call: the first decides, and each runs its
own part of every probe in a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from onecopy.errors import OnecopyError, SettingsError
from onecopy.planner.machine.calibration import Calibration, read_calibration, write_calibration
from onecopy.planner.machine.here import look
from onecopy.planner.machine.machine import Gpu, Machine
from onecopy.planner.quantities import parse_bytes
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.expectation import Expectation
from onecopy.tuner.job import TrainingJob, check_candidate, keys_to_paste
from onecopy.tuner.journal import Journal
from onecopy.tuner.outcome import Outcome, outcome_of
from onecopy.tuner.probe.crew import Crew, Given, Local
from onecopy.tuner.probe.order import Length, Limits
from onecopy.tuner.search import OBJECTIVES, Objective, Search
from onecopy.tuner.space import Space, space_of
from onecopy.tuner.tuned import Probe, Tuned, compared
from onecopy.tuner.workload import Loss, MakeBatch, MakeModel, MakeOptimizer, OwnLoop, Workload

_GIVE_UP: Final = 1.5
"""A setting whose first timed steps take so many times the best one's is not measured further."""

_ROOM: Final = 0.95
"""Share of a host's memory that ranks may take where nothing is said."""

_FAILURES: Final = 3
"""Probes that fail for another reason than memory, before any was measured, until the search gives up."""

JOURNAL: Final = "journal.jsonl"


@dataclass(frozen=True)
class Wanted:
    """What a search is to do.

    Attributes:
        global_batch: samples in a step over all ranks.
        ranks: to start; None for 2 on the CPU or one for each accelerator. Given ranks are as many as they are.
        device: "auto", "cpu", "cuda", ...
        memory: bytes that a rank may hold; None for what the device has.
        budget: seconds.
        probes: most probes, those of an earlier journal not counted.
        directory: where the journal is kept; None keeps none.
        limits: of a probe; its memory is replaced.
        calibrate: whether to start from this machine's calibration and keep what is learnt.
        machine: what probes run on; None looks.
    """

    global_batch: int
    space: Space = field(default_factory=Space)
    ranks: int | None = None
    device: str = "auto"
    objective: Objective = "tokens_per_second"
    memory: int | None = None
    budget: float = 1200.0
    probes: int = 1000
    directory: Path | None = None
    limits: Limits = field(default_factory=Limits)
    length: Length = field(default_factory=Length)
    calibrate: bool = True
    machine: Machine | None = None


def tune(
    build: MakeModel,
    batches: MakeBatch,
    *,
    global_batch: int,
    space: Space | Mapping[str, Any] | None = None,
    ranks: int | None = None,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    precision: str | None = None,
    objective: str = "tokens_per_second",
    memory: int | str | None = None,
    budget: float = 1200.0,
    directory: str | os.PathLike[str] | None = None,
    device: str = "auto",
    calibration: bool = True,
    say: Callable[[str], None] | None = None,
    probes: int = 1000,
    limits: Limits | None = None,
    length: Length | None = None,
    machine: Machine | None = None,
) -> Tuned:
    """Find the best settings for a model and a loop of one's own, by measuring them in processes of their own.

    Functions must stand at the top of a module or of the program itself, as for `torch.multiprocessing`; a program
    makes this call below ``if __name__ == "__main__":``.

    Args:
        build: makes the model, on the CPU.
        batches: called with a number of samples, makes a micro-batch: a dict of the model's keyword arguments, or a
            tuple of its positional ones.
        global_batch: samples in a step over all ranks.
        space: which values to try, see `onecopy.tuner.space.Space`; None for its defaults.
        ranks: to start on this machine: None for 2 on the CPU, or one for each accelerator. With a process group, or
            under torchrun, it is left out: the ranks are those.
        optimizer: makes the optimizer of the parameters; None for AdamW, fused.
        loss: of the model and a batch; None takes the output's ``loss``, or the output.
        precision: as `onecopy.shard` takes it.
        objective: "tokens_per_second"; "memory", the fewest bytes; or "cost", the fewest rank-seconds a sample.
        memory: bytes that a rank may hold, or a size like "24GB"; None for what there is.
        budget: seconds after which no new probe starts.
        directory: where a journal of probes is kept, from which the same call goes on; None keeps none.
        device: "auto", "cpu", "cuda", ...
        calibration: start from what was measured on this machine before, and keep what is measured.
        say: told a line for each probe.
        probes: the most that this call starts.
        limits: what a probe may take beside ``memory``: its time, silence, and a place for control groups.
        length: how long a probe measures.
        machine: what ranks run on, as the planner has it; None looks, which takes some seconds.

    Returns:
        What was found, on every rank.

    Raises:
        SettingsError: for what cannot work, and for functions that fail whatever is set.
        WriteError: if the journal cannot be written.
    """
    if isinstance(space, Mapping):
        space = space_of(dict(space), "space")
    space = space or Space()
    wanted = Wanted(
        global_batch,
        space,
        ranks,
        device,
        objective_of(objective),
        int(parse_bytes(memory)) if isinstance(memory, str) else memory,
        budget,
        directory=None if directory is None else Path(directory),
        calibrate=calibration,
        probes=probes,
        limits=limits or Limits(),
        length=length or Length(),
        machine=machine,
    )
    return search_for(OwnLoop(build, batches, optimizer, loss, precision, space.states), wanted, say)


def objective_of(name: str) -> Objective:
    """An objective by its name.

    Raises:
        SettingsError: if there is none of that name.
    """
    for known in OBJECTIVES:
        if name == known:
            return known
    close = get_close_matches(name, OBJECTIVES, n=1, cutoff=0.0)[0]
    raise SettingsError(f"objective must be one of {', '.join(OBJECTIVES)}; found {name!r}, did you mean {close!r}?")


def search_for(
    workload: Workload, wanted: Wanted, say: Callable[[str], None] | None = None, crew: Crew | None = None
) -> Tuned:
    """Search for the best settings of a workload. Raises as `tune` does.

    Args:
        crew: ranks to probe on, which stay open; None takes those that are given, or starts some.
    """
    if wanted.global_batch < 1:
        raise SettingsError(f"global_batch must be positive; found {wanted.global_batch}")
    device = wanted.device
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found.type if found else "cpu"
    with _crew(workload, wanted, device) if crew is None else nullcontext(crew) as crew:
        if not crew.leads:
            while crew.share(False):
                crew.probe(Candidate(0, 1, 1, 1), Length(), Limits())
            outcome: Tuned | OnecopyError = crew.share(SettingsError(""))
        else:
            try:
                outcome = _Lead(workload, wanted, crew, say or (lambda line: None)).run()
            except OnecopyError as error:
                outcome = error
            crew.share(False)
            crew.share(outcome)
    if isinstance(outcome, OnecopyError):
        raise outcome
    return outcome


def _crew(workload: Workload, wanted: Wanted, device: str) -> Crew:
    """The ranks that a process group or torchrun has, or new ones."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if wanted.ranks is not None:
            raise SettingsError("ranks are given by the process group or torchrun; leave ranks out")
        return Given(workload, device)
    ranks = wanted.ranks
    if ranks is None:
        ranks = 2 if device == "cpu" else max(1, torch.accelerator.device_count())
    if ranks < 1:
        raise SettingsError(f"ranks must be positive; found {ranks}")
    return Local(workload, ranks, device)


class _Lead:
    """The process that decides."""

    def __init__(self, workload: Workload, wanted: Wanted, crew: Crew, say: Callable[[str], None]) -> None:
        self._workload, self._wanted, self._crew, self._say = workload, wanted, crew, say
        space = wanted.space
        host_memory = [o for o in (*space.offload, *space.checkpointing) if o.endswith("cpu")]
        if crew.device == "cpu" and host_memory:
            raise SettingsError(f"{host_memory[0]!r} moves what is in host memory already: ranks compute on the CPU")
        candidates = space.candidates(crew.size, wanted.global_batch)
        if isinstance(crew, Given) and any(one.ranks != crew.size for one in candidates):
            raise SettingsError(f"space.ranks must be left out: {crew.size} ranks are given")
        candidates = self._possible(candidates)
        self._journal = self._open_journal()
        machine, self._machine_words = self._look()
        memory = wanted.memory
        if memory is None and crew.device == "cpu":
            memory = int(_ROOM * (machine.host_memory or machine.gpu.memory * crew.size) / crew.size)
        self._limits = replace(wanted.limits, memory=memory)
        self._expectation = Expectation(workload, machine)
        # One setting is planned here, so that functions that fail do so before any process starts.
        self._expectation.memory(candidates[0], Calibration())
        known = read_calibration() if wanted.calibrate else None
        self._search = Search(candidates, self._expectation, wanted.objective, memory, known)
        for candidate, outcome in self._journal.known if self._journal else ():
            self._search.add(candidate, outcome)

    def _look(self) -> tuple[Machine, str]:
        """The machine, as it was when the journal began: corrections are of what was seen then."""
        if self._wanted.machine is not None:
            return self._wanted.machine, self._wanted.machine.gpu.name
        if self._journal is not None and (kept := self._journal.machine) is not None:
            return Machine(**kept["values"] | {"gpu": Gpu(**kept["values"]["gpu"])}), kept["words"]
        here = self._crew.size if self._crew.device == "cpu" else min(self._crew.size, torch.accelerator.device_count())
        machine, words = look(here)
        nodes = self._crew.size // here
        machine = replace(machine, gpus=self._crew.size, nodes=nodes)
        if self._journal is not None:
            values = {field.name: getattr(machine, field.name) for field in fields(machine)}
            self._journal.keep_machine({"values": values | {"gpu": machine.gpu._asdict()}, "words": words})
        return machine, words

    def _possible(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those that the training job would take; the reason of the first refusal if it takes none."""
        workload = self._workload
        if not isinstance(workload, TrainingJob):
            if any(one.tensor > 1 for one in candidates):
                raise SettingsError("space.tensor is for `onecopy tune`: a model of one's own is cut by its own code")
            return candidates
        reasons = {one: check_candidate(workload.config, one, workload.states) for one in candidates}
        possible = [one for one, reason in reasons.items() if reason is None]
        if not possible:
            raise SettingsError(f"nothing of the space can work: {next(filter(None, reasons.values()))}")
        return possible

    def _open_journal(self) -> Journal | None:
        if self._wanted.directory is None:
            return None
        identity = self._workload.identity() | {
            "global_batch": self._wanted.global_batch,
            "ranks": self._crew.size,
            "device": self._crew.device,
            "memory": self._wanted.memory,
        }
        journal = Journal(self._wanted.directory / JOURNAL, identity)
        if journal.known:
            self._say(f"going on after {len(journal.known)} probes of {self._wanted.directory / JOURNAL}")
        return journal

    def run(self) -> Tuned:
        """Probe until the search ends, the budget is spent, or somebody ends it."""
        search, wanted = self._search, self._wanted
        began, done, interrupted = time.monotonic(), 0, False
        try:
            while (candidate := search.next()) is not None:
                if time.monotonic() - began >= wanted.budget or done >= wanted.probes:
                    search.ended = "the budget is spent"
                    break
                self._probe(candidate)
                done += 1
        except KeyboardInterrupt:
            search.ended, interrupted = "it was interrupted; the same command goes on", True
        finally:
            if self._journal is not None:
                self._journal.close()
        if self._wanted.calibrate and search.measured:
            write_calibration(search.calibration.of(self._expectation.machine))
        return self._result(interrupted)

    def _probe(self, candidate: Candidate) -> None:
        search = self._search
        length = self._wanted.length
        if search.best is not None and search.objective != "memory":
            timed = search.tried[search.best].timed
            assert timed is not None
            length = replace(length, give_up_over=_GIVE_UP * timed.seconds * search.best.ranks / candidate.ranks)
        start = time.monotonic()
        self._crew.share(True)
        reports = self._crew.probe(candidate, length, self._limits)
        outcome = outcome_of(reports, self._limits, time.monotonic() - start)
        search.add(candidate, outcome)
        if self._journal is not None:
            self._journal.add(candidate, outcome)
        self._say(f"{search.probes}. {candidate.words()}: {outcome.words()}")
        self._check(candidate, outcome)

    def _check(self, candidate: Candidate, outcome: Outcome) -> None:
        """Give up where it is not the setting that fails."""
        if outcome.kind == "crash" and outcome.phase in ("build", "batch") and not self._search.measured:
            raise SettingsError(
                f"the {'model cannot be built' if outcome.phase == 'build' else 'batch cannot be made'} in a probe: "
                f"{outcome.message}\n{outcome.traceback}".rstrip()
            )
        kinds = [known.kind for known in self._search.tried.values()]
        if len(kinds) >= _FAILURES and all(kind in ("crash", "hang") for kind in kinds):
            raise SettingsError(
                f"the first {len(kinds)} probes all failed, the last one ({candidate.words()}) so: {outcome.words()}"
                f"\n{outcome.traceback}".rstrip()
            )

    def _result(self, interrupted: bool) -> Tuned:
        search, workload = self._search, self._workload
        order = search.ranking()
        rest = sorted((one for one in search.tried if one not in order), key=lambda one: search.tried[one].kind)
        probes = {one: self._row(one) for one in [*order, *rest]}
        best = probes[order[0]] if order else None
        runner_up = probes[order[1]] if len(order) > 1 else None
        left_out = sum(search.is_hopeless(one) for one in search.candidates if one not in search.tried)
        config = None
        if best is not None and isinstance(workload, TrainingJob):
            config = keys_to_paste(workload.config, best.candidate, workload.states)
        return Tuned(
            workload.name,
            search.objective,
            list(probes.values()),
            best,
            runner_up,
            self._reason(best, runner_up),
            search.ended,
            interrupted,
            len(search.candidates),
            left_out,
            self._limits.memory,
            self._crew.size,
            self._wanted.global_batch,
            self._expectation.tokens,
            search.calibration,
            workload.precision,
            self._wanted.space.states,
            config,
            self._machine_words,
            tuple(self._expectation.notes),
        )

    def _row(self, candidate: Candidate) -> Probe:
        search, expectation = self._search, self._expectation
        plain = Calibration(base=search.calibration.base)
        return Probe(
            candidate,
            search.tried[candidate],
            expectation.seconds(candidate, plain),
            expectation.memory(candidate, plain),
            expectation.seconds(candidate, search.calibration),
            expectation.memory(candidate, search.calibration),
        )

    def _reason(self, best: Probe | None, runner_up: Probe | None) -> str:
        if best is None:
            kinds = [known.kind for known in self._search.tried.values()]
            failed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none was tried"
            return f"No setting could be measured ({failed})."
        tried = len(self._search.tried)
        first = f"S{best.candidate.words()[1:]} is the best of {tried} settings tried: {best.outcome.words()}."
        if runner_up is None:
            return f"{first} Nothing else could be measured."
        why = self._expectation.why_slower(runner_up.candidate, best.candidate, self._search.calibration)
        return f"{first} {compared(best, runner_up, self._search.objective, self._search.noise(best.candidate), why)}"
