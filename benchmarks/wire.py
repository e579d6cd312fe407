"""What each system really sends in a step, by the kernel's own count, beside what the ZeRO paper says it should.

    sudo python benchmarks/wire.py
    sudo python benchmarks/wire.py --rate 1gbit 100mbit --micro-batches 1 --batch 2 --length 128

Every rank runs in its own network namespace (`namespaces.py`), and the bytes that left by its interface are read before
and after a number of steps, each time behind a barrier. Nothing is subtracted: Ethernet, IP and TCP headers,
acknowledgements, control messages and the barrier itself are all in the figure (0.1 to 0.2 % on unshaped links, where
packets are large). The paper's figure is a stage's multiple of Ψ(N-1)/N (ZeRO §7), Ψ being the model's parameters:
2 for stages 0 and 1, g + 1 for stage 2, 3g for stage 3, with g micro-batches in a step.

With `--rate` the same steps are also timed on links that carry no more than that.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import onecopy
from gpt import GPT, Shape
from namespaces import INTERFACE, Network, bytes_sent, unavailable
from onecopy.planner.traffic import step_elements
from step_time import SHAPES

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMULAS: Final = {0: "2Ψ", 1: "2Ψ", 2: "(g+1)Ψ", 3: "3gΨ"}
MESSAGE_LIMIT: Final = timedelta(seconds=120)
"""After which gloo gives a message up. A whole unit takes 11 s at 10 Mbit/s."""


@dataclass(frozen=True)
class System:
    """Something that trains: the stage whose traffic it promises, and how it is set up."""

    stage: int
    set_up: Callable[[GPT, Case], Trainer]


@dataclass(frozen=True)
class Case:
    system: str
    precision: str
    micro_batches: int


@dataclass(frozen=True)
class Trainer:
    """One optimizer step on a list of micro-batches; and, where one is kept, the count of model-state bytes sent."""

    step: Callable[[list[Tensor]], None]
    ledger_bytes: Callable[[], int] | None = None


@dataclass(frozen=True)
class Work:
    """What a step computes, and how many of them."""

    shape: Shape
    batch: int
    length: int
    steps: int
    warmup: int = 2
    limit: float = 1800.0
    """Seconds that all the cases on one network may take."""


@dataclass(frozen=True)
class Measured:
    """One case on one network.

    Attributes:
        paper: bytes that a rank sends in a step, by the paper.
        sent: the same, by the kernel's count, for each rank.
        ledger: the same, by onecopy's own count, for each rank; None for other systems.
        seconds: of each step, on the slowest rank.
    """

    system: str
    stage: int
    precision: str
    micro_batches: int
    ranks: int
    rate: str | None
    paper: float
    sent: list[float]
    ledger: list[float] | None
    seconds: list[float]


class RanksError(RuntimeError):
    """The ranks did not finish."""


# --- the systems


def _onecopy(stage: int) -> System:
    def set_up(model: GPT, case: Case) -> Trainer:
        onecopy.shard(model, stage, precision=case.precision, accumulate=case.micro_batches)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        total = onecopy.ledger(model).total
        return Trainer(_loop(model, optimizer), lambda: total.state_bytes)

    return System(stage, set_up)


def _ddp(model: GPT, case: Case) -> Trainer:
    wrapped = DistributedDataParallel(model.to(DTYPES[case.precision]), gradient_as_bucket_view=True)
    return Trainer(_loop(wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True)))


def _zero_redundancy(model: GPT, case: Case) -> Trainer:
    wrapped = DistributedDataParallel(model.to(DTYPES[case.precision]), gradient_as_bucket_view=True)
    return Trainer(_loop(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, fused=True)))


def _fully_shard(stage: int, reshard: bool) -> System:
    def set_up(model: GPT, case: Case) -> Trainer:
        dtype = DTYPES[case.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
        return Trainer(_loop(model, torch.optim.AdamW(model.parameters(), fused=True)))

    return System(stage, set_up)


def _deepspeed(stage: int) -> System:
    def set_up(model: GPT, case: Case) -> Trainer:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.micro_batches,
            "bf16": {"enabled": case.precision == "bf16"},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(batches: list[Tensor]) -> None:
            for batch in batches:
                engine.backward(engine(batch[:, :-1], batch[:, 1:]))
                engine.step()

        return Trainer(step)

    return System(stage, set_up)


SYSTEMS: Final = {
    **{f"onecopy stage {stage}": _onecopy(stage) for stage in range(4)},
    "DDP": System(0, _ddp),
    "DDP + ZeroRedundancyOptimizer": System(1, _zero_redundancy),
    "fully_shard, reshard_after_forward=False": _fully_shard(2, reshard=False),
    "fully_shard, reshard_after_forward=True": _fully_shard(3, reshard=True),
    **{f"DeepSpeed stage {stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}


def _loop(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[list[Tensor]], None]:
    """The plain training loop, with DDP's way to accumulate where the model has it."""
    pause = getattr(model, "no_sync", nullcontext)

    def step(batches: list[Tensor]) -> None:
        for number, batch in enumerate(batches, start=1):
            with pause() if number < len(batches) else nullcontext():
                (model(batch[:, :-1], batch[:, 1:]) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- in a rank


def _run_rank(rank: int, num_ranks: int, network: Network, cases: list[Case], work: Work, folder: Path) -> None:
    # The launcher's handler is not a rank's; and a rank ends with its launcher, however that ended.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    # Peers call functions that torch is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning)
    network.enter(rank)
    torch.set_num_threads(1)
    # Ranks in one machine would find each other's memory, and leave nothing for the kernel to count.
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "ONECOPY_CROSS_MEMORY": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=MESSAGE_LIMIT)
    with _results(folder, rank).open("w") as results:
        for case in cases:
            print(json.dumps(_measure_case(rank, case, work)), file=results, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measure_case(rank: int, case: Case, work: Work) -> dict[str, Any]:
    """This rank's bytes in a step, on average, and the seconds of each step."""
    torch.manual_seed(0)
    trainer = SYSTEMS[case.system].set_up(GPT(work.shape), case)
    batches = _batches(rank, case, work)
    for _ in range(work.warmup):
        trainer.step(next(batches))
    booked = trainer.ledger_bytes or (lambda: 0)
    # Who has passed a barrier has received all it waited for; so all that was sent to it has left.
    dist.barrier()
    counted, sent, seconds = booked(), [], []
    for _ in range(work.steps):
        start, before = perf_counter(), bytes_sent()
        trainer.step(next(batches))
        dist.barrier()
        seconds.append(perf_counter() - start)
        sent.append(bytes_sent() - before)
    return {
        # On a busy machine TCP takes a late answer for a loss now and then, and sends again.
        "sent": statistics.median(sent),
        "ledger": (booked() - counted) / work.steps if trainer.ledger_bytes else None,
        "seconds": seconds,
    }


def _batches(rank: int, case: Case, work: Work) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    size = (work.batch, work.length + 1)
    while True:
        yield [torch.randint(0, work.shape.vocabulary, size, generator=generator) for _ in range(case.micro_batches)]


def _results(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


# --- in the launcher


def measure(cases: list[Case], num_ranks: int, work: Work, rate: str | None = None) -> list[Measured]:
    """Run ``cases`` one after the other on a network of their own, which is gone afterwards.

    The caller must run no threads: ranks are forked from it.

    Raises:
        RanksError: if they do not finish within the work's limit.
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="onecopy-wire-") as name, Network(num_ranks, rate) as network:
        folder = Path(name)
        args = (num_ranks, network, cases, work, folder)
        ranks = mp.start_processes(_run_rank, args, nprocs=num_ranks, join=False, start_method="fork")
        try:
            deadline = monotonic() + work.limit
            while not ranks.join(timeout=max(0.0, deadline - monotonic()), grace_period=2.0):
                if monotonic() >= deadline:
                    done = min(len(_read(folder, rank)) for rank in range(num_ranks))
                    raise RanksError(
                        f"expected {len(cases)} cases on {num_ranks} ranks within {work.limit:.0f} s, found {done} "
                        f"done: {cases[min(done, len(cases) - 1)]} was running. Allow more with --limit, or do less"
                    )
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        by_rank = [_read(folder, rank) for rank in range(num_ranks)]
    parameters = count_parameters(work.shape)
    found = []
    for case, figures in zip(cases, zip(*by_rank, strict=True), strict=True):
        stage = SYSTEMS[case.system].stage
        elements = step_elements(stage, parameters, num_ranks, case.micro_batches).total
        ledger = [figure["ledger"] for figure in figures]
        found.append(
            Measured(
                **asdict(case),
                stage=stage,
                ranks=num_ranks,
                rate=rate,
                paper=elements * DTYPES[case.precision].itemsize,
                sent=[figure["sent"] for figure in figures],
                ledger=None if None in ledger else ledger,
                seconds=[max(step) for step in zip(*(figure["seconds"] for figure in figures), strict=True)],
            )
        )
    return found


def count_parameters(shape: Shape) -> int:
    """Ψ."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


def _read(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = _results(folder, rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- tables


def bytes_table(found: list[Measured], precision: str) -> str:
    """What was sent over Ψ(N-1)/N / what the paper says = the ratio; for each system, N and g."""

    def cell(one: Measured) -> str:
        multiple = step_elements(one.stage, 1.0, one.ranks, one.micro_batches).total * one.ranks / (one.ranks - 1)
        ratio = statistics.mean(one.sent) / one.paper
        text = f"{multiple * ratio:.2f} / {multiple:.0f} = {ratio:.3f}"
        worst = max(one.sent) / one.paper
        return f"{text} (one rank {worst:.3f})" if worst > 1.01 * ratio else text

    return _table([one for one in found if one.precision == precision and one.rate is None], _column, cell)


def seconds_table(found: list[Measured], precision: str) -> str:
    """Median seconds of a step; for each system, rate, N and g."""

    def column(one: Measured) -> str:
        return f"{one.rate or 'unshaped'}, {_column(one)}"

    return _table(
        [one for one in found if one.precision == precision],
        column,
        lambda one: f"{statistics.median(one.seconds):.3f}",
    )


def _column(one: Measured) -> str:
    return f"N={one.ranks} g={one.micro_batches}"


def _table(found: list[Measured], column: Callable[[Measured], str], cell: Callable[[Measured], str]) -> str:
    columns = list(dict.fromkeys(column(one) for one in found))
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        rows.setdefault(f"{one.system} | {FORMULAS[one.stage]}", {})[column(one)] = cell(one)
    lines = ["| system | paper | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    lines += [
        f"| {name} | " + " | ".join(cells.get(head, "") for head in columns) + " |" for name, cells in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help="some of: " + "; ".join(SYSTEMS))
    parser.add_argument("--model", choices=SHAPES, default="3m")
    parser.add_argument("--batch", type=int, default=1, help="samples a rank in a micro-batch")
    parser.add_argument("--length", type=int, default=8, help="tokens a sample; few, for CPUs that are slow in bf16")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each case")
    parser.add_argument("--rate", nargs="+", default=[], help="also shape the links to each of these, such as 100mbit")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all cases on one network")
    parser.add_argument("--json", help="file for everything measured")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    # So that a polite end, too, passes through the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    systems = options.only or list(SYSTEMS)
    if importlib.util.find_spec("deepspeed") is None:
        missing = [system for system in systems if system.startswith("DeepSpeed")]
        systems = [system for system in systems if system not in missing]
        if missing:
            print(f"left out, since deepspeed is not installed: {', '.join(missing)}\n")
    cases = [
        Case(system, precision, micro_batches)
        for precision in options.precision
        for micro_batches in options.micro_batches
        for system in systems
    ]
    work = Work(SHAPES[options.model], options.batch, options.length, options.steps, limit=options.limit)
    found = [
        one
        for rate in [None, *options.rate]
        for num_ranks in options.ranks
        for one in measure(cases, num_ranks, work, rate)
    ]
    parameters = count_parameters(work.shape)
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"options": asked, "parameters": parameters, "measured": [asdict(one) for one in found]}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    for precision in options.precision:
        print(f"Bytes a rank and step, {precision}: sent / paper = ratio, in units of Ψ(N-1)/N, Ψ = {parameters:,}")
        print(f"\n{bytes_table(found, precision)}\n")
        if options.rate:
            print(f"Median seconds of a step, {precision}\n\n{seconds_table(found, precision)}\n")


if __name__ == "__main__":
    main()
