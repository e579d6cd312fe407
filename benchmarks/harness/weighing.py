"""Weighing: what a system alone needs: resident memory, and bytes on the wire; of onecopy, what explains the former.

A system's memory is what the process holds at its peak over what it held before the model was made. That has the share
of the process in it: Python, threads, pages of code that are written to, kernels' scratch. So onecopy is also weighed
over a process that has trained a small model of the same kind before, and let it go. What that finds is held against

    formula + activations + named buffers

where the formula is ZeRO §5, and named is what the meter counts beyond it at its peak: communication buffers, units
gathered at stage 3, and gradients under way: at stages 2 and 3 those that are whole, at stage 0 those that are there
before and after their reduce. Activations are counted in one profiled step.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import onecopy
from harness.forks import run_ranks
from harness.namespaces import Network, bytes_sent
from harness.process import restart_peak, return_freed_memory, status_bytes
from harness.systems import System
from harness.work import Entrant, Work
from onecopy.planner.formulas.memory import model_state_bytes
from onecopy.planner.formulas.traffic import step_elements
from onecopy.stage import Stage
from trained.cases import CASES, DTYPES, count

EXPLAINED: Final = 1.05
"""What a peak may be of its formula, activations and named buffers."""

_ACTIVATIONS: Final = ("activations", "checkpoints")


@dataclass(frozen=True)
class Weighed:
    """What a system alone needed, in bytes, on the rank that needed most.

    Attributes:
        resident: the resident set's peak in the counted steps, over what it was before the model was made.
        meter: onecopy's own count at its peak in a profiled step, by category; None for other systems.
        formula: model states by ZeRO §5: K = 8 in fp32, whose parameters are their own masters; in bf16 K = 12, and
            only onecopy keeps masters: None for other systems.
        sent: on the wire in a step, by the kernel's counter; None without namespaces.
        paper: the same by ZeRO §7.
        own: what the process held more once a small model had been trained in it and let go; None for other systems.
    """

    resident: int
    meter: dict[str, int] | None
    formula: float | None
    sent: float | None
    paper: float
    own: int | None = None


@dataclass(frozen=True)
class Account:
    """A peak of onecopy beside what explains it, in bytes.

    Attributes:
        found: the resident set's peak, without the process's own share.
        formula, activations: see the file's head.
        named: buffers beyond the formula, by name.
        slices: parameters' slices, which at stages 1 and 2 lie beside the whole parameters until the step; the formula
            for fp32 has none, and they are no part of what is expected here.
    """

    found: float
    formula: float
    activations: float
    named: dict[str, float]
    slices: float

    @property
    def ratio(self) -> float:
        """Found over expected."""
        return self.found / (self.formula + self.activations + sum(self.named.values()))


def account(weighed: Weighed, stage: int, precision: str) -> Account | None:
    """The peak explained; None for other systems than onecopy."""
    if weighed.meter is None or weighed.own is None or weighed.formula is None:
        return None
    kind, peak = Stage.of(stage), weighed.meter
    named = {"communication": float(peak["communication"])}
    if kind.shards_parameters:
        named["gathered"] = float(peak["parameters_gathered"])
    if kind.shards_gradients:
        named["gradients under way"] = float(peak["gradients_whole"])
    elif not kind.shards_optimizer and precision == "fp32":
        # 4 of the formula's 16 bytes are gradients.
        twice = peak["gradients_whole"] + peak["gradients_sliced"] - weighed.formula / 4
        named["gradients under way"] = max(0.0, twice)
    beside = kind.shards_optimizer and not kind.shards_parameters and precision == "fp32"
    return Account(
        found=float(weighed.resident - weighed.own),
        formula=weighed.formula,
        activations=float(sum(peak[name] for name in _ACTIVATIONS)),
        named=named,
        slices=float(peak["parameters_sliced"]) if beside else 0.0,
    )


def weigh_alone(work: Work, system: System, network: bool, limit: float) -> Weighed:
    """Run a system alone. The caller must run no threads.

    Args:
        network: count bytes on the wire; needs root.
        limit: seconds.

    Raises:
        RanksError: if its ranks do not finish within the limit.
        torch.multiprocessing.ProcessException: with the traceback of a rank that failed.
    """
    if network:
        with Network(work.ranks) as cables:
            lines = run_ranks(work.ranks, _weigh_rank, system, work, True, limit=limit, network=cables)
    else:
        lines = run_ranks(work.ranks, _weigh_rank, system, work, False, limit=limit, threads=work.threads)
    found = [json.loads(own[-1]) for own in lines]
    most = max(found, key=lambda one: one["resident"])
    return Weighed(
        resident=most["resident"],
        meter=most["meter"],
        formula=_formula(work, system.stage, ours=system.ours),
        sent=max(one["sent"] for one in found) if network else None,
        paper=_paper(work, system.stage),
        own=most["own"],
    )


def _formula(work: Work, stage: int, ours: bool) -> float | None:
    parameters, trainable = count(CASES[work.case])
    share = trainable / parameters
    if work.precision == "fp32":
        element, optimizer = 4, 8 * share
    elif ours:
        # What is frozen has a master too, and no states.
        element, optimizer = 2, 4 + 8 * share
    else:
        return None
    return model_state_bytes(
        *(stage, parameters, work.ranks),
        parameter_bytes=element,
        gradient_bytes=element * share,
        optimizer_bytes=optimizer,
    ).total


def _paper(work: Work, stage: int) -> float:
    parameters, trainable = count(CASES[work.case])
    # What is frozen does not change, and needs a gather only where whole parameters are let go.
    gathered = parameters if Stage.of(stage).shards_parameters else trainable
    trained = step_elements(stage, trainable, work.ranks, work.micro_batches)
    elements = trained.reduce_scatter + trained.all_reduce
    elements += step_elements(stage, gathered, work.ranks, work.micro_batches).all_gather
    return elements * DTYPES[work.precision].itemsize


# --- in a rank


def _weigh_rank(rank: int, write: Callable[[str], None], system: System, work: Work, network: bool) -> None:
    importlib.import_module(system.package)
    return_freed_memory()
    # Threads and libraries that any training loads are no system's own.
    nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    before = status_bytes("VmRSS")
    own = _own_share(system, work, rank) if system.ours else None
    entrant = Entrant(system, work, rank)
    sharded = entrant.trainer.sharded
    for _ in range(max(1, work.warmup)):
        entrant.trainer.step(entrant.batches())
    gc.collect()
    # Who has passed a barrier has received all it waited for; so all that was sent to it has left.
    dist.barrier()
    sent = bytes_sent() if network else 0
    # And who has passed a second one may fetch slices for the next step.
    dist.barrier()
    restart_peak()
    steps = 2
    for _ in range(steps):
        entrant.trainer.step(entrant.batches())
    peak = status_bytes("VmHWM")
    dist.barrier()
    answer: dict[str, Any] = {
        "resident": peak - before,
        "own": own,
        "sent": (bytes_sent() - sent) / steps if network else None,
        "meter": None,
    }
    if sharded is not None:
        # A step more, since looking at every saved tensor costs memory.
        meter = onecopy.meter(sharded)
        meter.reset_peaks()
        with onecopy.profile(sharded):
            entrant.trainer.step(entrant.batches())
        answer["meter"] = meter.peak
    write(json.dumps(answer))


def _own_share(system: System, work: Work, rank: int) -> int:
    """Bytes that stay with the process when a small model has been trained in it."""
    before = status_bytes("VmRSS")
    small = Entrant(system, work, rank, small=True)
    for _ in range(2):
        small.trainer.step(small.batches())
    del small
    gc.collect()
    dist.barrier()
    return status_bytes("VmRSS") - before
