"""The script that the kill test trains: `onecopy run ... trained/survivor.py DIRECTORY PLAN [STRETCH]`, both as JSON.

A plan names a rank, a way to end it and the moment, for every so many steps; a file says that it was carried out, so
that the step which is made again does not end the same rank again. Results go to DIRECTORY/result-RANK.json.

Where the number of ranks changes on the way, DIRECTORY/met-GENERATION-RANK.json says who was a rank from which step on,
and with a STRETCH of them the same is trained from checkpoint to checkpoint, in runs that end and begin.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.checkpoint.random import put_generators, take_generators
from onecopy.resilience import points
from onecopy.resilience.dividing import MicroBatch, divide
from onecopy.resilience.membership import membership
from onecopy.resilience.slices import checksum

MOST = 2
"""Samples that a rank computes at a time, where a global batch is divided."""

PREPARING = ("forward", "backward", "reduced", "sent", "agree")
PASSING = ("agreed", "half", "applied", "top")
RECOVERING = ("meeting", "met", "vote", "drafted", "switched", "states", "settled", "user", "user sent")


@dataclass(frozen=True)
class Plan:
    """What happens to a run.

    Attributes:
        steps: that it makes.
        every: steps between two losses; 0: none.
        stage, copies, accumulate: how it is sharded, and its micro-batches.
        scaler: with a loss scale that overflows now and then.
        model: "small", or a size of the GPT.
        kinds: the ways in which ranks end.
        again: how often a second rank ends in the recovery.
        again_points: at which moments of it.
        save_every: steps between checkpoints; 0: none.
        global_batch: samples in a step, divided over the ranks that there are; 0: each rank has its own data.
        ranks: that are wanted, where some may be missing.
        last_loss: no loss after so many steps; 0: any step may have one.
        pause: seconds after each step while ranks are missing and no further one is to be lost.
    """

    steps: int = 100
    every: int = 0
    seed: int = 0
    stage: int = 3
    copies: int = 1
    accumulate: int = 1
    scaler: bool = False
    model: str = "small"
    kinds: tuple[str, ...] = ("kill", "raise", "exit")
    points: tuple[str, ...] = (*PREPARING, *PASSING, "random")
    again: float = 0.25
    again_points: tuple[str, ...] = RECOVERING
    save_every: int = 0
    mirror: bool = True
    global_batch: int = 0
    ranks: int = 0
    last_loss: int = 0
    pause: float = 0.0


@dataclass(frozen=True)
class Loss:
    """Who ends in a step, how and when; and who in the recovery from it."""

    rank: int
    kind: str
    point: str
    seconds: float
    second: int | None
    second_point: str


def loss_at(plan: Plan, step: int, ranks: int) -> Loss | None:
    """The loss of a step, alike on every rank."""
    if not plan.every or step % plan.every != plan.every // 2 or step > (plan.last_loss or step):
        return None
    rng = random.Random(f"{plan.seed}/{step}")
    rank = rng.randrange(ranks)
    kind, point = rng.choice(plan.kinds), rng.choice(plan.points)
    # One that has nothing of the lost rank's: in a ring of mirrors the next but one. With two copies each other rank
    # has its slices or its random numbers.
    second = (rank + 2) % ranks if ranks > 3 and rng.random() < plan.again and plan.copies == 1 else None
    return Loss(rank, kind, point, rng.random() * 0.02, second, rng.choice(plan.again_points))


class Net(nn.Module):
    """Dropout, tied weights, and a buffer that changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)), 0.1) + x
        return F.cross_entropy(self.head(x - self.mean).flatten(0, 1), targets.flatten())


class Killer:
    """Ends this process when the plan says so."""

    def __init__(self, plan: Plan, folder: Path, run: onecopy.Run) -> None:
        self._plan, self._folder, self._run = plan, folder, run
        # This rank's number and that of all, before a loss that others may have made good already.
        self._before = run.rank, run.ranks
        points.observers.append(self.reach)

    def reach(self, point: str) -> None:
        """This rank has come to ``point``."""
        rank, steps = int(os.environ["RANK"]), self._run.steps
        if point == "settled":
            self._tell_who_met(rank, steps)
        if point in RECOVERING:
            before, ranks = self._before
            for step in (steps - 1, steps, steps + 1):
                loss = loss_at(self._plan, step, ranks)
                if loss and loss.second == before and loss.second_point == point and self._is_done(step):
                    self._end(f"again-{step}", "exit" if loss.kind == "raise" else loss.kind)
            return
        self._before = rank, dist_size()
        step = steps - 1 if point == "applied" else steps
        loss = loss_at(self._plan, step, dist_size())
        if loss is None or loss.rank != rank:
            return
        if loss.point == point:
            self._end(f"lost-{step}", loss.kind)
        elif loss.point == "random" and point == "top" and not self._is_done(step):
            threading.Timer(
                loss.seconds, self._end, (f"lost-{step}", "kill" if loss.kind == "raise" else loss.kind)
            ).start()

    def _tell_who_met(self, rank: int, steps: int) -> None:
        member = membership()
        assert member is not None
        assert member.now is not None
        told = {"generation": member.now.number, "members": member.now.members, "steps": steps}
        (self._folder / f"met-{member.attempt}-{member.now.number}-{rank}.json").write_text(json.dumps(told))

    def _is_done(self, step: int) -> bool:
        return (self._folder / f"lost-{step}").exists()

    def _end(self, name: str, kind: str) -> None:
        try:
            file = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(file, json.dumps({"time": time.time(), "kind": kind}).encode())
        if kind == "raise":
            raise LookupError("as planned")
        if kind == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        # A signal to itself arrives at once, or at the next return from the kernel.
        time.sleep(60)


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def build(plan: Plan) -> nn.Module:
    """The model, and units that make it worth a schedule."""
    torch.manual_seed(0)
    if plan.model == "small":
        return Net()
    from step_time import SHAPES
    from trained.gpt import GPT

    return GPT(SHAPES[plan.model])


def batches_of(plan: Plan, rank: int, step: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Micro-batches of the steps from ``step`` on; the whole batch where it is divided over ranks."""
    vocabulary, length = (64, 8) if plan.model == "small" else (8192, 128)
    for number in range(step, plan.steps):
        generator = torch.Generator().manual_seed(number * 1000 + (500 if plan.global_batch else rank))
        if plan.global_batch:
            size = (2, plan.global_batch, length)
            yield [tuple(torch.randint(0, vocabulary, size, generator=generator))]  # type: ignore[list-item]
            continue
        yield [
            tuple(torch.randint(0, vocabulary, (2, 4, length), generator=generator))  # type: ignore[misc]
            for _ in range(plan.accumulate)
        ]


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(
        b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def main() -> None:
    """Train as the arguments say."""
    plan = Plan(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[2]).items()})
    onecopy.join(timeout=60)
    folder = Path(sys.argv[1])
    if len(sys.argv) > 3:
        found = train_a_stretch(plan, folder, Stretch(**json.loads(sys.argv[3])))
        (folder / f"result-{dist.get_rank()}.json").write_text(json.dumps({"result": found, "resources": {}}))
    else:
        train(plan, folder)


@dataclass(frozen=True)
class Made:
    """What is trained, on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler | None
    metrics: dict[str, float]


def make(plan: Plan, rank: int, *, mirror: bool, accumulate: int) -> Made:
    model = build(plan)
    units = list(model.layers) if isinstance(model, Net) else "auto"
    onecopy.shard(model, plan.stage, units=units, copies=plan.copies, mirror=mirror, accumulate=accumulate)  # type: ignore[arg-type]
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s / 20))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20) if plan.scaler else None
    return Made(model, optimizer, scheduler, scaler, {"loss": 0.0})


Part = tuple[Tensor, Tensor, float]
"""Tokens, targets, and by what their loss is multiplied."""


def cut(batch: list[tuple[Tensor, Tensor]], micro_batches: list[MicroBatch]) -> list[Part]:
    """This rank's parts of a global batch."""
    ((tokens, targets),) = batch
    return [(tokens[m.samples], targets[m.samples], m.weight) for m in micro_batches]


def compute(made: Made, parts: list[Part], step: int, killer: Killer | None) -> float:
    """Forward and backward of a step. Returns the loss."""
    total = 0.0
    for number, (tokens, targets, weight) in enumerate(parts):
        loss = made.model(tokens, targets) * weight
        if killer is not None and number == 0:
            killer.reach("forward")
        if made.scaler is not None:
            loss = made.scaler.scale(loss if step % 13 else loss * float("inf"))
        if killer is not None:
            loss.register_hook(lambda _: killer.reach("backward"))
        loss.backward()
        total += loss.item()
    if made.scaler is not None:
        made.scaler.unscale_(made.optimizer)
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
    return total


def describe(made: Made, steps: int) -> dict[str, Any]:
    """What is compared bit for bit."""
    model, optimizer = made.model, made.optimizer
    with torch.no_grad(), onecopy.gathered(model):
        weights = digest(list(model.parameters()))
    # By names, for a checkpoint brings states back in another order.
    named = [state for states in optimizer.state.values() for state in sorted(states.items())]
    states = [value.local for _, value in named if isinstance(value, onecopy.SlicedTensor)]
    return {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "steps": steps,
        "weights": weights,
        "states": digest(states),
        "random": digest([take_generators()["torch"]]),
        "buffers": digest(list(model.buffers())) if list(model.buffers()) else "",
        "rate": optimizer.param_groups[0]["lr"],
        "scheduler": made.scheduler.last_epoch,
        "scaler": made.scaler.state_dict() if made.scaler is not None else None,
        "metrics": made.metrics,
        "sum": sum(checksum(b.masters.in_memory) for b in model._onecopy_engine.buckets),  # type: ignore[union-attr]
    }


def train(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train as the plan says, on the ranks of the default process group. Returns this rank's result."""
    mirror = plan.mirror and plan.copies == 1 and plan.stage > 0
    made = make(plan, dist.get_rank(), mirror=mirror, accumulate=plan.accumulate)
    run = onecopy.resilient(
        made.model,
        made.optimizer,
        scheduler=made.scheduler,
        scaler=made.scaler,
        metrics=made.metrics,
        checkpoints=folder / "checkpoints" if plan.save_every else None,
        save_every=plan.save_every,
    )
    killer = Killer(plan, folder, run)
    log = (folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)
    told = 0
    seconds: list[float] = []
    mark = time.perf_counter()
    for batch in run.loop(lambda step: batches_of(plan, run.rank, step)):
        with run:
            killer.reach("top")
            if plan.global_batch:
                parts = cut(batch, run.micro_batches(plan.global_batch, MOST))
            else:
                parts = [(tokens, targets, 1 / plan.accumulate) for tokens, targets in batch]
            total = compute(made, parts, run.steps, killer)
            run.step(total)
            if made.scaler is not None:
                made.scaler.update()
            made.scheduler.step()
            made.metrics["loss"] += run.total[0] if run.total[0] < 1e9 else 0.0
        if not seconds:
            first = {"rank": run.rank, "steps": run.steps, "stepped": time.time()}
            (folder / f"first-{os.getpid()}.json").write_text(json.dumps(first))
        seconds.append(time.perf_counter() - mark)
        for repair in run.repairs[told:]:
            log.write(json.dumps(asdict(repair) | {"stepped": time.time()}) + "\n")
        told = len(run.repairs)
        if run.ranks < plan.ranks and run.steps > plan.last_loss:
            time.sleep(plan.pause)
        mark = time.perf_counter()
    run.check()
    result = describe(made, run.steps)
    resources = {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "repairs": len(run.repairs),
        "step": statistics.median(seconds[2:] or seconds),
        "mirror": onecopy.meter(made.model).live["mirror"],
        "sent": traffic.bytes_sent("mirror") if (traffic := onecopy.ledger(made.model).last_step) else 0,
        "padded": onecopy.padded_numel(made.model),
    }
    (folder / f"result-{run.rank}.json").write_text(json.dumps({"result": result, "resources": resources}))
    return result


@dataclass(frozen=True)
class Stretch:
    """Steps that the same ranks made.

    Attributes:
        start, stop: numbers of steps.
        streams: the stream of random numbers of each rank, by the number of the rank that began it.
    """

    start: int
    stop: int
    streams: tuple[int, ...]


def train_a_stretch(plan: Plan, folder: Path, stretch: Stretch) -> dict[str, Any]:
    """Train so far with a plain loop, from a checkpoint to a checkpoint. Returns this rank's result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    micro_batches = len(divide(plan.global_batch, MOST, rank, ranks)) if plan.global_batch else plan.accumulate
    made = make(plan, rank, mirror=False, accumulate=micro_batches)
    own = folder / f"generators-{stretch.streams[rank]}"
    if stretch.start:
        loaded = onecopy.load(
            folder / "saved", made.model, made.optimizer, scheduler=made.scheduler, scaler=made.scaler
        )
        assert loaded.step == stretch.start
        made.metrics.update(loaded.extra)
    if own.exists():
        put_generators(torch.load(own))
    for number, batch in zip(range(stretch.start, stretch.stop), batches_of(plan, rank, stretch.start), strict=False):
        made.optimizer.zero_grad()
        parts = [(tokens, targets, 1 / plan.accumulate) for tokens, targets in batch]
        if plan.global_batch:
            parts = cut(batch, divide(plan.global_batch, MOST, rank, ranks))
        total = compute(made, parts, number, None)
        if made.scaler is not None:
            made.scaler.step(made.optimizer)
            made.scaler.update()
        else:
            made.optimizer.step()
        made.scheduler.step()
        totals: list[float] = [0.0] * ranks
        dist.all_gather_object(totals, total)
        made.metrics["loss"] += sum(totals) if sum(totals) < 1e9 else 0.0
    onecopy.save(
        folder / "saved",
        made.model,
        made.optimizer,
        scheduler=made.scheduler,
        scaler=made.scaler,
        step=stretch.stop,
        extra=made.metrics,
    )
    torch.save(take_generators(), own)
    return describe(made, stretch.stop)


if __name__ == "__main__":
    main()
