"""The script that the kill test trains: `onecopy run ... trained/survivor.py DIRECTORY PLAN`, PLAN as JSON.

A plan names a rank, a way to end it and the moment, for every so many steps; a file says that it was carried out, so
that the step which is made again does not end the same rank again. Results go to DIRECTORY/result-RANK.json.
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
from onecopy.checkpoint.random import take_generators
from onecopy.resilience import points
from onecopy.resilience.slices import checksum

PREPARING = ("forward", "backward", "reduced", "sent", "agree")
PASSING = ("agreed", "half", "applied", "top")
RECOVERING = ("meeting", "met", "vote", "states", "settled", "user", "user sent")


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
        save_every: steps between checkpoints; 0: none.
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
    save_every: int = 0
    mirror: bool = True


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
    if not plan.every or step % plan.every != plan.every // 2:
        return None
    rng = random.Random(f"{plan.seed}/{step}")
    rank = rng.randrange(ranks)
    kind, point = rng.choice(plan.kinds), rng.choice(plan.points)
    # One that has nothing of the lost rank's: in a ring of mirrors the next but one. With two copies each other rank
    # has its slices or its random numbers.
    second = (rank + 2) % ranks if ranks > 3 and rng.random() < plan.again and plan.copies == 1 else None
    return Loss(rank, kind, point, rng.random() * 0.02, second, rng.choice(RECOVERING))


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
        points.observers.append(self.reach)

    def reach(self, point: str) -> None:
        """This rank has come to ``point``."""
        rank, steps = int(os.environ["RANK"]), self._run.steps
        if point in RECOVERING:
            for step in (steps - 1, steps, steps + 1):
                loss = loss_at(self._plan, step, dist_size())
                if loss and loss.second == rank and loss.second_point == point and self._is_done(step):
                    self._end(f"again-{step}", "exit" if loss.kind == "raise" else loss.kind)
            return
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
    """Micro-batches of the steps from ``step`` on."""
    vocabulary, length = (64, 8) if plan.model == "small" else (8192, 128)
    for number in range(step, plan.steps):
        generator = torch.Generator().manual_seed(number * 1000 + rank)
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
    train(plan, Path(sys.argv[1]))


def train(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train as the plan says, on the ranks of the default process group. Returns this rank's result."""
    rank = dist.get_rank()
    model = build(plan)
    units = list(model.layers) if isinstance(model, Net) else "auto"
    mirror = plan.mirror and plan.copies == 1 and plan.stage > 0
    onecopy.shard(model, plan.stage, units=units, copies=plan.copies, mirror=mirror, accumulate=plan.accumulate)  # type: ignore[arg-type]
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s / 20))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20) if plan.scaler else None
    metrics = {"loss": 0.0}
    run = onecopy.resilient(
        model,
        optimizer,
        scheduler=scheduler,
        scaler=scaler,
        metrics=metrics,
        checkpoints=folder / "checkpoints" if plan.save_every else None,
        save_every=plan.save_every,
    )
    killer = Killer(plan, folder, run)
    log = (folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)
    told = 0
    seconds: list[float] = []
    mark = time.perf_counter()
    for micro_batches in run.loop(lambda step: batches_of(plan, rank, step)):
        with run:
            killer.reach("top")
            total = 0.0
            for number, (tokens, targets) in enumerate(micro_batches):
                loss = model(tokens, targets) / plan.accumulate
                if number == 0:
                    killer.reach("forward")
                if scaler is not None:
                    loss = scaler.scale(loss if run.steps % 13 else loss * float("inf"))
                loss.register_hook(lambda _: killer.reach("backward"))
                loss.backward()
                total += loss.item()
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.step(total)
            if scaler is not None:
                scaler.update()
            scheduler.step()
            metrics["loss"] += run.total[0] if run.total[0] < 1e9 else 0.0
        seconds.append(time.perf_counter() - mark)
        mark = time.perf_counter()
        for repair in run.repairs[told:]:
            log.write(json.dumps(asdict(repair) | {"stepped": time.time()}) + "\n")
        told = len(run.repairs)
    run.check()
    with torch.no_grad(), onecopy.gathered(model):
        weights = digest(list(model.parameters()))
    states = [
        value.local for s in optimizer.state.values() for value in s.values() if isinstance(value, onecopy.SlicedTensor)
    ]
    result = {
        "rank": rank,
        "steps": run.steps,
        "weights": weights,
        "states": digest(states),
        "random": digest([take_generators()["torch"]]),
        "buffers": digest(list(model.buffers())) if list(model.buffers()) else "",
        "rate": optimizer.param_groups[0]["lr"],
        "scheduler": scheduler.last_epoch,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "metrics": metrics,
        "sum": sum(checksum(b.masters.in_memory) for b in model._onecopy_engine.buckets),  # type: ignore[union-attr]
    }
    resources = {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "repairs": len(run.repairs),
        "step": statistics.median(seconds[2:] or seconds),
        "mirror": onecopy.meter(model).live["mirror"],
        "sent": onecopy.ledger(model).last_step.bytes_sent("mirror") if onecopy.ledger(model).last_step else 0,
        "padded": onecopy.padded_numel(model),
    }
    (folder / f"result-{rank}.json").write_text(json.dumps({"result": result, "resources": resources}))
    return result


if __name__ == "__main__":
    main()
