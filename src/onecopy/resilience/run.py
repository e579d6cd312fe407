"""Run: training that survives the loss of ranks, in a plain loop.

    run = onecopy.resilient(model, optimizer, scheduler=scheduler)
    for batch in run.loop(batches_from):      # the batch of the step that counts, until it is committed
        with run:                             # a loss of ranks ends the block; survivors meet anew and come again
            loss = model(**batch).loss
            loss.backward()
            run.step()                        # the commit point; what follows it runs exactly once
            scheduler.step()

How a step is made by all ranks or by none is in `commits.py`; what a rank holds in `holdings.py`, and what it begins a
step with in `top.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from onecopy.errors import UsageError
from onecopy.resilience.capsules import Belongings
from onecopy.resilience.commits import Again, Commits
from onecopy.resilience.dividing import MicroBatch, divide
from onecopy.resilience.holdings import Holdings
from onecopy.resilience.losses import Repair, is_loss
from onecopy.resilience.membership import Slow, membership
from onecopy.resilience.points import reach
from onecopy.resilience.saves import Saves
from onecopy.resilience.settling import all_come
from onecopy.resilience.top import Top
from onecopy.sharding.setup.api import engine_of

T = TypeVar("T")


class Run:
    """A run that survives the loss of ranks. `resilient` makes it; docs/recovery.md shows the loop around it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: torch.amp.GradScaler | None,
        kept: dict[str, Any],
        checkpoints: Path | None,
        save_every: int,
        keep: int,
    ) -> None:
        engine = self._engine = engine_of(model)
        belongings = Belongings(engine, optimizer, {**kept, "scaler": scaler})
        self._optimizer = optimizer
        self._holdings = Holdings(engine, optimizer, scaler, belongings)
        self._top = Top(belongings)
        self._saves = Saves(
            model,
            optimizer,
            belongings,
            scheduler=kept.get("scheduler"),
            scaler=scaler,
            directory=checkpoints,
            every=save_every,
            keep=keep,
        )
        self._commits = Commits(engine, self._holdings, self._top, self._saves)
        self._begun = False
        self._part_since = 0.0
        # The version that this attempt at a step began with.
        self._attempt = -1
        self._closes = False
        # Of each loop that has ended, the version then.
        self._ends: list[int] = []
        self._loops = 0

    @property
    def steps(self) -> int:
        """How many have been made."""
        return self._commits.steps

    @property
    def rank(self) -> int:
        """This rank's number now; it may be another one after a loss."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        """How many ranks there are now."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def repairs(self) -> list[Repair]:
        """The losses that were made good while this process was a rank."""
        return self._commits.repairs

    @property
    def slow(self) -> list[Slow]:
        """Ranks that did not answer for half of the heartbeat's limit, while this process was a rank."""
        member = membership()
        found = [] if member is None else member.slow()
        return [slow for slow in found if slow.until >= self._part_since]

    @property
    def total(self) -> list[float]:
        """The sum over ranks of the values that the last `step` was given."""
        return self._commits.total

    # --- the loop

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]:
        """Yield the batch of every step until it is committed. Gradients are cleared before and after each.

        Args:
            batches: called with a number of steps, returns the batches from that step on; the same on every rank's
                every call, and drawing no numbers from global random generators. All ranks have equally many. It is
                called again where `rank` or `ranks` have changed, for data to be divided anew.
        """
        self._begin()
        number = self._next_loop()
        stream: Iterator[T] | None = None
        fetched: list[T] = []
        fetched_at = -1
        divided = (-1, -1)
        while True:
            self._come_to_top()
            if number < len(self._ends) and self._commits.version >= self._ends[number]:
                return
            if stream is None or divided != (self.rank, self.ranks):
                divided, fetched_at = (self.rank, self.ranks), -1
                stream = iter(batches(self.steps))
            if fetched_at != self._commits.version:
                fetched = [batch for _, batch in zip(range(1), stream, strict=False)]
                fetched_at = self._commits.version
            if not fetched:
                with suppress(Again):
                    self._commits.end(self._end_loop)
                    return
                continue
            self._begin_attempt(closes=False)
            yield fetched[0]

    def attempts(self) -> Iterator[None]:
        """The block again until it has gone through on all ranks: for what ends a run, such as a last save."""
        self._begin()
        number = self._next_loop()
        while True:
            self._come_to_top()
            if number < len(self._ends) and self._commits.version >= self._ends[number]:
                return
            self._begin_attempt(closes=True)
            yield

    def _begin_attempt(self, *, closes: bool) -> None:
        self._optimizer.zero_grad()
        self._top.begin_attempt()
        self._attempt = self._commits.version
        self._commits.begin_attempt()
        self._closes = closes

    def _next_loop(self) -> int:
        """The number of a loop that begins. One before it that was left by break ended here, for newcomers too."""
        number, self._loops = self._loops, self._loops + 1
        while len(self._ends) < number:
            self._ends.append(self._commits.version)
        return number

    def _end_loop(self) -> None:
        self._ends.append(self._commits.version + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            if self._closes:
                with suppress(Again):
                    self._commits.end(self._end_loop)
            elif self._commits.version == self._attempt:
                raise UsageError(
                    "the block `with run:` has ended without run.step(), so the loop would give it the same batch for "
                    "ever: call run.step() in place of optimizer.step(); with update=False it leaves the weights alone."
                )
            return False
        if isinstance(error, Again):
            return True
        if not is_loss(error):
            return False
        if self._commits.version > self._attempt:
            raise UsageError(
                "a rank was lost while this one sent or received something after run.step(), where lines run exactly "
                "once and cannot be repeated: move evaluation, saves and collectives to the beginning of the block."
            ) from error
        self._commits.recover()
        return True

    # --- a step

    def step(self, *values: float, update: bool = True) -> list[float]:
        """Step the optimizer on all ranks, or on none. Gradients must be final: accumulated, and clipped.

        A scaler's `unscale_` and `step` are made in here; its `update` and the scheduler's step follow.

        Args:
            values: summed over ranks on the way: losses, a request to stop.
            update: False leaves parameters as they are (a loss that is not finite); alike on all ranks.

        Returns:
            The sums.

        Raises:
            UsageError: if the optimizer's own step sends messages.
        """
        if not self._holdings.is_met:
            raise UsageError("run.step() belongs into a block `with run:` inside `for batch in run.loop(...)`")
        self._commits.step(values, update=update)
        return self.total

    def micro_batches(self, global_batch: int, most: int) -> list[MicroBatch]:
        """This rank's part of a global batch, which stays the same whatever number of ranks there is.

        It also tells the model how many micro-batches the step has, in place of `onecopy.shard(accumulate=)`: to be
        called once in each attempt at a step, before the first forward.

        Args:
            global_batch: samples in a step, over all ranks.
            most: samples that a rank computes at a time.

        Returns:
            Equally many on every rank. Each says which samples of the global batch it has, and by what their mean loss
            is to be multiplied.

        Raises:
            SettingsError: if one of the numbers is below 1.
        """
        found = divide(global_batch, most, self.rank, self.ranks)
        self._engine.micro_batches.expect(len(found))
        return found

    # --- the top of the loop

    def _begin(self) -> None:
        """The first loop begins: with other ranks' states if they have any, else from a checkpoint or the start."""
        if self._begun:
            return
        self._begun = True
        if dist.is_initialized() and dist.get_backend() == "fake":
            self._commits.version = self._holdings.cut = -1
            self._top.is_informed = False
            self._commits.recover()
            self._part_since = self.repairs[0].since
            return
        self._holdings.connect()
        world = self._holdings.world
        self._saves.load(world)
        self._commits.steps = self._saves.newest
        self._top.knows = [True] * world.size
        self._holdings.begin()
        if (member := membership()) is not None:
            all_come(world)
            member.begin()

    def _come_to_top(self) -> None:
        """Between two steps: what this rank is to begin the next one with, and what newcomers lack of it."""
        self._top.come(self._commits.version, {"steps": self.steps, "ends": list(self._ends)})
        while True:
            try:
                if self._commits.grows:
                    self._commits.grow()
                if not all(self._top.knows):
                    self._tell_newcomers()
                if self._saves.is_due(self.steps):
                    reach("save")
                    self.save()
                return
            except RuntimeError as error:
                if not is_loss(error):
                    raise
                self._commits.recover()

    def _tell_newcomers(self) -> None:
        holdings = self._holdings
        if (
            counts := self._top.tell_newcomers(holdings.world, self._commits.version, holdings.capsules[0])
        ) is not None:
            self._commits.steps, self._ends = counts["steps"], list(counts["ends"])

    def save(self) -> None:
        """Save a checkpoint now; between steps alone, inside `attempts()` for instance."""
        self._saves.save(self.steps)

    def check(self) -> None:
        """Hold every mirror against what it mirrors, by checksums; between steps, on all ranks.

        Raises:
            RecoveryError: on every rank, if one differs.
        """
        self._holdings.check()
