"""Muon: a step of it over whole matrices, beside its peers' ways, and beside a step of AdamW.

    python benchmarks/muon.py                          # GPT of 30 M, 2 ranks
    python benchmarks/muon.py --case gpt-120m --ranks 4 --json benchmarks/results/muon_gpt120m_4.json

All train the same model on the same data with Muon over the blocks' matrices and AdamW over the rest:

    onecopy stage N    each matrix whole on one rank, which updates it; torch.optim.Muon, unchanged
    fully_shard        every rank gathers each matrix's update, orthogonalises all of them, and keeps its part
    DDP                every rank has all matrices, and updates all of them

Newton-Schulz's work is N times as much on the two peers as it need be. Time is taken with all systems in the same
processes, in turn; memory with each alone (`harness/contest.py`). Three ratios are printed beside their targets: the
step's time and the peak over each peer's, and the step's time over AdamW's, once Newton-Schulz's own arithmetic, timed
alone on one rank's share, is taken off.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import onecopy
from harness.contest import Contest, hold
from harness.systems import Settings, Step, System, Trainer
from harness.work import Work
from onecopy.sharding.bucket.owners import Item, choose_owners, cost_of_newton_schulz
from trained.cases import CASES, Batch

PEERS: Final = ("DDP", "fully_shard")
BESIDE_ADAMW: Final = 1.1
"""Target: the step over AdamW's, Newton-Schulz's arithmetic taken off."""

LEARNING_RATE: Final = 0.02


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is Muon's."""
    return parameter.ndim == 2 and name.startswith("blocks.")


def loop(model: Any, optimizers: Sequence[Optimizer]) -> Callable[[list[Batch]], Step]:
    """The plain training loop."""
    pause = getattr(model, "no_sync", nullcontext)

    def step(batches: list[Batch]) -> Step:
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            with pause() if number < len(batches) else nullcontext():
                loss = model(*batch) / len(batches)
                loss.backward()
            total += loss.item()
        start = perf_counter()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return Step(total, perf_counter() - start)

    return step


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Muon's parameters and AdamW's."""
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return [p for n, p in named if is_hidden(n, p)], [p for n, p in named if not is_hidden(n, p)]


def with_muon(model: nn.Module, muon: Callable[[list[nn.Parameter]], Optimizer]) -> list[Optimizer]:
    hidden, others = split(model)
    return [muon(hidden), AdamW(others, fused=True)]


def plain_muon(parameters: list[nn.Parameter]) -> Optimizer:
    return Muon(parameters, lr=LEARNING_RATE)


def ours(stage: int) -> System:
    def set_up(model: nn.Module, settings: Settings) -> Trainer:
        optimizers = with_muon(model, plain_muon)
        onecopy.shard(model, stage, accumulate=settings.micro_batches, optimizer=optimizers)
        return Trainer(loop(model, optimizers), sharded=model)

    return System(stage, set_up)


def ours_with_adamw(stage: int) -> System:
    def set_up(model: nn.Module, settings: Settings) -> Trainer:
        onecopy.shard(model, stage, accumulate=settings.micro_batches)
        return Trainer(loop(model, [AdamW(model.parameters(), fused=True)]), sharded=model)

    # Its losses are another optimizer's: it is timed like the floor, which nothing is held against.
    return System(stage, set_up, floor=True)


def ddp(model: nn.Module, settings: Settings) -> Trainer:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    return Trainer(loop(wrapped, with_muon(wrapped, plain_muon)))


class GatheredMuon(Optimizer):
    """Muon over DTensors cut along rows, as `torch.optim.Muon` defines it: each update is gathered by every rank."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            state["momentum_buffer"].lerp_(p.grad, 1 - 0.95)
            update = p.grad.lerp(state["momentum_buffer"], 0.95).full_tensor()
            update = newton_schulz(update).to(p.dtype)
            rank, size = p.device_mesh.get_local_rank(), p.device_mesh.size()
            rows = update.chunk(size)[rank]
            own = DTensor.from_local(rows, p.device_mesh, [Shard(0)], shape=p.shape, stride=p.stride())
            p.mul_(1 - self.param_groups[0]["lr"] * 0.1)
            p.add_(own, alpha=-self.param_groups[0]["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def newton_schulz(gradient: Tensor) -> Tensor:
    """Five iterations in bf16 with the coefficients of Jordan et al. 2024, as in `torch.optim.Muon`."""
    x = gradient.bfloat16()
    if tall := gradient.shape[0] > gradient.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


def gathering(model: nn.Module, settings: Settings) -> Trainer:
    blocks: Any = model.blocks
    for module in (*blocks, model):
        fully_shard(module)
    optimizers = with_muon(model, lambda hidden: GatheredMuon(hidden, lr=LEARNING_RATE))
    return Trainer(loop(model, optimizers))


ADAMW: Final = "onecopy stage 3 with AdamW"
SYSTEMS: Final = {
    "DDP": System(0, ddp),
    "fully_shard": System(3, gathering),
    **{f"onecopy stage {stage}": ours(stage) for stage in (1, 2, 3)},
    ADAMW: ours_with_adamw(3),
}


def arithmetic(case: str, ranks: int, rounds: int) -> float:
    """Seconds of Newton-Schulz on what the dearest of ``ranks`` ranks owns, alone."""
    hidden, _ = split(CASES[case].build())
    owners = choose_owners([Item(p.numel(), cost_of_newton_schulz(p.shape)) for p in hidden], ranks)
    costs = [
        sum(cost_of_newton_schulz(p.shape) for p, o in zip(hidden, owners, strict=True) if o == r) for r in range(ranks)
    ]
    own = [torch.randn(p.shape) for p, o in zip(hidden, owners, strict=True) if o == costs.index(max(costs))]
    taken = []
    for _ in range(rounds):
        start = perf_counter()
        for matrix in own:
            newton_schulz(matrix)
        taken.append(perf_counter() - start)
    return statistics.median(taken)


def report(contest: Contest, alone: float) -> list[str]:
    """What was found, as lines of text."""
    lines = [str(contest.work), f"Newton-Schulz on a rank's share, alone: {alone:.3f} s"]
    for name, timed in contest.timed.items():
        weighed = contest.weighed.get(name)
        memory = f"{weighed.resident / 2**20:8.0f} MiB" if weighed else ""
        seconds, own = statistics.median(timed.seconds), statistics.median(timed.optimizer)
        lines.append(
            f"{name:<28}{seconds:8.3f} s, of it the step {own:7.3f} s {memory}  losses off {timed.deviation:.1e}"
        )
    for name in (name for name in contest.timed if name.startswith("onecopy")):
        for peer in (peer for peer in PEERS if peer in contest.timed):
            low, middle, high = (contest.ratio(name, peer)[place] for place in (1, 0, 2))
            text = f"{name} / {peer}: time {middle:.2f} ({low:.2f} to {high:.2f})"
            if name in contest.weighed and peer in contest.weighed:
                text += f", memory {contest.weighed[name].resident / contest.weighed[peer].resident:.2f}"
            lines.append(text + "; target below 1")
    if contest.floor is not None and "onecopy stage 3" in contest.timed:
        left = statistics.median(contest.timed["onecopy stage 3"].seconds) - alone
        ratio = left / statistics.median(contest.floor.seconds)
        lines.append(f"onecopy stage 3 without Newton-Schulz / with AdamW: {ratio:.2f}; target {BESIDE_ADAMW}")
    return [*lines, *(f"left out: {name}: {reason}" for name, reason in contest.left_out.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", default="gpt-30m", choices=[name for name in CASES if name.startswith("gpt")])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a system alone")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = Work(
        given.case,
        "fp32",
        given.micro_batches,
        given.ranks,
        given.samples,
        given.size,
        given.steps,
        given.warmup,
        given.threads,
    )
    systems = {name: SYSTEMS[name] for name in given.only}
    contest = hold(work, systems, weigh=not given.no_memory, network=False, limit=given.limit)
    # Last, for ranks are forked from a process that has computed nothing.
    torch.set_num_threads(given.threads)
    alone = arithmetic(given.case, given.ranks, given.steps)
    print("\n".join(report(contest, alone)))
    if given.json:
        given.json.write_text(json.dumps(asdict(contest) | {"arithmetic": alone}, indent=1) + "\n")


if __name__ == "__main__":
    main()
