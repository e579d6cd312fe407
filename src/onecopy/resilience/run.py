"""Run: training that survives the loss of ranks, in a plain loop.

    run = onecopy.resilient(model, optimizer, scheduler=scheduler)
    for batch in run.loop(batches_from):      # the batch of the step that counts, until it is committed
        with run:                             # a loss of ranks ends the block; survivors meet anew and come again
            loss = model(**batch).loss
            loss.backward()
            run.step()                        # the commit point; what follows it runs exactly once
            scheduler.step()

A step in its parts:

    prepare   reduce, unscale, clip; the neighbour that mirrors this slice gets its final gradient, and a capsule
    agree     all ranks tell that they have that. Who has heard all others knows: every update can be made twice
    apply     this rank's slice and its mirror are updated; no message
    advance   the version counts up

After a loss the highest version that any rank has reached counts, and one that has not heard all applies what it has
prepared (`settling.py`). So a step that one rank has made is made by all, and one that none has made is done over.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from onecopy.checkpoint.directory import find_checkpoints
from onecopy.checkpoint.load import load
from onecopy.checkpoint.random import pack, put_generators, take_generators, unpack
from onecopy.checkpoint.save import save
from onecopy.comm.mesh import Axis
from onecopy.errors import CollectiveError, OnecopyError, RecoveryError, SettingsError, UsageError
from onecopy.resilience.capsules import Belongings, is_unscaled, unscaled_alike
from onecopy.resilience.meeting import meet
from onecopy.resilience.membership import Generation, membership
from onecopy.resilience.points import reach
from onecopy.resilience.settling import MIRROR, OWN, Standing, agree, first_mirrors, hand_over, settle
from onecopy.resilience.slices import Mirror, Slices, check_optimizer, group_values, own_gradients, own_slices
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.setup.api import engine_of

T = TypeVar("T")

_DTYPES: Final = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_A_MOMENT: Final = 0.5
"""Seconds in which the launcher tells of a loss that has shown itself as some other error first."""

_log = logging.getLogger("onecopy")


class _Again(Exception):
    """This attempt at a step is over; it is made again."""


@dataclass(frozen=True)
class Repair:
    """A loss of ranks that was made good.

    Attributes:
        step: steps that were made when it came.
        ranks: that were replaced.
        began, met, settled: Unix times in seconds: the loss was noticed here, the ranks had met, they had their slices.
    """

    step: int
    ranks: tuple[int, ...]
    began: float
    met: float
    settled: float

    @property
    def seconds(self) -> float:
        """From the loss until all ranks had their slices."""
        return self.settled - self.began


class Run:
    """See the file's first lines; made by `resilient`.

    Attributes:
        steps: how many have been made.
        repairs: the losses that were made good while this process was a rank.
        total: the sum over ranks of the values that the last `step` was given.
    """

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
        self.steps = 0
        self.repairs: list[Repair] = []
        self.total: list[float] = []
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._engine: Engine = engine_of(model)
        self._belongings = Belongings(self._engine, optimizer, {**kept, "scaler": scaler})
        self._scheduler = kept.get("scheduler")
        self._checkpoints, self._save_every, self._keep = checkpoints, save_every, keep
        self._saved = 0
        self._world: Axis | None = None
        self._mirror: Mirror | None = None
        self._held: dict[str, Slices] = {}
        # Steps and ends of loops that were committed; -1: this process is new and holds nothing.
        self._version = 0
        self._begun = False
        self._pending: Callable[[], None] | None = None
        self._capsules: tuple[Tensor | None, Tensor | None] = (None, None)
        self._coming: tuple[Tensor | None, Tensor | None] = (None, None)
        self._knows: list[bool] = []
        self._snapshot: dict[str, Any] = {}
        self._generators: dict[str, Any] = {}
        self._at = -1
        self._is_redone = False
        self._attempt = -1
        self._closes = False
        self._ends: list[int] = []
        self._loops = 0
        self._messages = -1

    # --- the loop

    def loop(self, batches: Callable[[int], Iterable[T]]) -> Iterator[T]:
        """Yield the batch of every step until it is committed. Gradients are cleared before and after each.

        Args:
            batches: called with a number of steps, returns the batches from that step on; the same on every rank's
                every call, and drawing no numbers from global random generators. All ranks have equally many.
        """
        self._begin()
        number = self._next_loop()
        stream: Iterator[T] | None = None
        fetched: list[T] = []
        fetched_at = -1
        while True:
            self._come_to_top()
            if number < len(self._ends) and self._version >= self._ends[number]:
                return
            if stream is None:
                stream = iter(batches(self.steps))
            if fetched_at != self._version:
                fetched = [batch for _, batch in zip(range(1), stream, strict=False)]
                fetched_at = self._version
            if not fetched:
                with suppress(_Again):
                    self._commit(None, self._end_loop)
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
            if number < len(self._ends) and self._version >= self._ends[number]:
                return
            self._begin_attempt(closes=True)
            yield

    def _begin_attempt(self, *, closes: bool) -> None:
        self._optimizer.zero_grad()
        if self._is_redone:
            put_generators(self._generators)
        else:
            self._generators = take_generators()
        self._attempt = self._version
        self._closes = closes

    def _next_loop(self) -> int:
        """The number of a loop that begins. One before it that was left by break ended here, for newcomers too."""
        number, self._loops = self._loops, self._loops + 1
        while len(self._ends) < number:
            self._ends.append(self._version)
        return number

    def _end_loop(self) -> None:
        self._ends.append(self._version + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            if self._closes:
                with suppress(_Again):
                    self._commit(None, self._end_loop)
            return False
        if isinstance(error, _Again):
            return True
        if not _is_loss(error):
            return False
        if self._version > self._attempt:
            raise UsageError(
                "a rank was lost while this one sent or received something after run.step(), where lines run exactly "
                "once and cannot be repeated: move evaluation, saves and collectives to the beginning of the block."
            ) from error
        self._recover()
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
        if self._world is None:
            raise UsageError("run.step() belongs into a block `with run:` inside `for batch in run.loop(...)`")
        self.total = list(values)
        self._commit(partial(self._prepare, values), partial(self._apply, update))
        return self.total

    def _commit(self, prepare: Callable[[], Tensor] | None, apply: Callable[[], None]) -> None:
        """Prepare, agree, apply. Returns once ``apply`` has run, by whatever way.

        Raises:
            _Again: if no rank has passed the commit point.
        """
        before = self._version
        try:
            if prepare is None:
                self._pending = apply
                self._agree(torch.zeros(1, dtype=torch.float64))
            else:
                values = prepare()
                self._pending = apply
                self._engine.open_step(partial(self._agree, values))
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            self._recover()
            if self._version == before:
                raise _Again from None
            return
        self._advance()

    def _agree(self, values: Tensor) -> None:
        assert self._world is not None
        reach("agree")
        agree(self._world, values)
        if values.numel() > 1:
            self.total = values.tolist()[1:]
        reach("agreed")

    def _prepare(self, values: tuple[float, ...]) -> Tensor:
        if self._scaler is not None and self._scaler.is_enabled() and not is_unscaled(self._scaler, self._optimizer):
            self._scaler.unscale_(self._optimizer)
        self._engine.begin_step()
        reach("reduced")
        self._coming = self._exchange_capsules(with_gradients=True)
        reach("sent")
        return torch.tensor([0.0, *values], dtype=torch.float64)

    def _exchange_capsules(self, *, with_gradients: bool) -> tuple[Tensor | None, Tensor | None]:
        """Send the rank before this one its capsule, and its gradients where that one mirrors it.

        Returns:
            This rank's capsule, and that of the rank after it.
        """
        world = self._world
        assert world is not None
        if world.size == 1:
            return None, None
        before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        present, flats = own_gradients(self._engine) if self._mirror and with_gradients else ([], list)
        codes = [_DTYPES.index(dtype) for dtypes in present for dtype in dtypes]
        own = self._belongings.capsule()
        header = torch.tensor([own.numel(), *codes])
        found = torch.empty_like(header)
        world.exchange_slices([(header, before)], [(found, after)], "mirror").finish()
        count, *found_codes = found.tolist()
        capsule = torch.empty(count, dtype=torch.uint8)
        sent, received = [(own, before)], [(capsule, after)]
        came: list[tuple[Tensor, Tensor]] = []
        if self._mirror is not None and with_gradients:
            dtypes = iter(_DTYPES[code] for code in found_codes)
            rooms = self._mirror.make_gradients([[next(dtypes) for _ in own_ones] for own_ones in present])
            sent += [(flat.detach().cpu(), before) for flat in flats()]
            came = [(room, room if room.is_cpu else torch.empty_like(room, device="cpu")) for room in rooms]
            received += [(arriving, after) for _, arriving in came]
        world.exchange_slices(sent, received, "mirror").finish()
        for room, arriving in came:
            if room is not arriving:
                room.copy_(arriving)
        return own, capsule

    def _advance(self) -> None:
        """Past the commit point: nothing here waits for another rank."""
        apply, self._pending = self._pending, None
        assert apply is not None
        apply()
        self._version += 1
        reach("applied")

    def _apply(self, update: bool) -> None:
        mirror = self._mirror
        if update:
            values = group_values(self._optimizer)
            with ExitStack() as stack:
                if mirror is not None and self._scaler is not None and self._scaler.is_enabled():
                    stack.enter_context(unscaled_alike(self._scaler, self._optimizer, mirror.optimizer))
                before = self._engine.ledger.total.calls
                self._step_one(self._optimizer)
                if self._engine.ledger.total.calls != before:
                    raise UsageError(
                        f"{type(self._optimizer).__name__} sends messages in its step (a norm over all ranks?), which "
                        f"must be local after the commit point: take an optimizer that updates each element by itself."
                    )
                reach("half")
                if mirror is not None:
                    mirror.follow(values, self._step_one)
        elif mirror is not None:
            mirror.forget_gradients()
        self._engine.close_step()
        self._optimizer.zero_grad()
        self._capsules = self._coming
        self.steps += 1

    def _step_one(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    # --- the top of the loop

    def _begin(self) -> None:
        """The first loop begins: with other ranks' states if they have any, else from a checkpoint or the start."""
        if self._begun:
            return
        self._begun = True
        if dist.is_initialized() and dist.get_backend() == "fake":
            self._version = -1
            self._recover()
            return
        self._connect()
        assert self._world is not None
        self._load(self._world)
        self._knows = [True] * self._world.size
        if self._mirror is not None:
            hand_over(self._world, self._engine, first_mirrors(self._world.size), self._held)
        self._capsules = self._exchange_capsules(with_gradients=False)
        if (member := membership()) is not None:
            agree(self._world, torch.zeros(1, dtype=torch.float64))
            member.begin()

    def _load(self, world: Axis) -> None:
        directory = self._checkpoints
        if directory is None or not world.exchange_objects(directory.is_dir() and bool(find_checkpoints(directory)))[0]:
            return
        loaded = load(directory, self._model, self._optimizer, scheduler=self._scheduler, scaler=self._scaler)
        self.steps = self._saved = loaded.step
        extra = loaded.extra
        if isinstance(extra, dict) and "onecopy.resilient" in extra:
            self._belongings.restore(extra["onecopy.resilient"])
        _log.warning("going on from %s, step %d", loaded.path, loaded.step)

    def _connect(self) -> None:
        """What follows from the process groups as they are now."""
        mesh = self._engine.mesh
        self._world = mesh.all_ranks()
        if self._engine.mirror and self._mirror is None:
            self._mirror = Mirror(self._engine, self._optimizer, (mesh.shard.rank + 1) % mesh.shard.size)
        self._held = {OWN: own_slices(self._engine, self._optimizer)}
        if self._mirror is not None:
            self._held[MIRROR] = self._mirror

    def _come_to_top(self) -> None:
        """Between two steps: what this rank is to begin the next one with, and what newcomers lack of it."""
        self._is_redone = self._at == self._version
        if self._knows[self._rank]:
            if self._is_redone:
                self._belongings.restore(self._snapshot)
                self._belongings.put_back_buffers()
            else:
                self._take_snapshot()
        while True:
            try:
                if not all(self._knows):
                    self._tell_newcomers()
                self._save_if_due()
                return
            except RuntimeError as error:
                if not _is_loss(error):
                    raise
                self._recover()

    @property
    def _rank(self) -> int:
        assert self._world is not None
        return self._world.rank

    def _take_snapshot(self) -> None:
        self._snapshot = self._belongings.snapshot()
        self._snapshot["buffers"] = self._belongings.remember_buffers()
        self._snapshot["run"] = {"steps": self.steps, "ends": list(self._ends)}
        self._at = self._version

    def _tell_newcomers(self) -> None:
        """The first rank that knows what users keep tells those that do not."""
        world = self._world
        assert world is not None
        reach("user")
        source = self._knows.index(True)
        own = pack(self._snapshot) if world.rank == source else torch.empty(0, dtype=torch.uint8)
        count = world.exchange_objects(own.numel())[source]
        lacking = [rank for rank, knows in enumerate(self._knows) if not knows]
        came = torch.empty(count if world.rank in lacking else 0, dtype=torch.uint8)
        sent = [(own, rank) for rank in lacking] if world.rank == source else []
        received = [(came, source)] if world.rank in lacking else []
        world.exchange_slices(sent, received, "states").finish()
        reach("user sent")
        agree(world, torch.zeros(1, dtype=torch.float64))
        if world.rank in lacking:
            self._snapshot = unpack(came)
            self._belongings.restore(self._snapshot)
            self._belongings.put_snapshot_buffers(self._snapshot["buffers"])
            found = self._snapshot["run"]
            self.steps, self._ends = found["steps"], list(found["ends"])
            if self._capsules[0] is not None:
                self._belongings.open_capsule(self._capsules[0])
            self._belongings.remember_buffers()
        self._knows = [True] * world.size
        # A newcomer begins this step; it does not do it over.
        self._at = self._version

    def _save_if_due(self) -> None:
        if self._checkpoints is None or not self._save_every or self.steps == self._saved:
            return
        if self.steps % self._save_every == 0:
            reach("save")
            self.save()

    def save(self) -> None:
        """Save a checkpoint now; between steps alone, inside `attempts()` for instance."""
        if self._checkpoints is None:
            raise UsageError("run.save() needs onecopy.resilient(..., checkpoints=directory)")
        save(
            self._checkpoints,
            self._model,
            self._optimizer,
            scheduler=self._scheduler,
            scaler=self._scaler,
            step=self.steps,
            keep=self._keep,
            extra={"onecopy.resilient": {key: self._belongings.snapshot()[key] for key in ("groups", "kept")}},
        )
        self._saved = self.steps

    def check(self) -> None:
        """Hold every mirror against what it mirrors, by checksums; between steps, on all ranks.

        Raises:
            RecoveryError: on every rank, if one differs.
        """
        world = self._world
        assert world is not None
        manifests = {kind: slices.describe() for kind, slices in self._held.items()}
        everyones = world.exchange_objects({kind: found.checksums for kind, found in manifests.items()})
        for rank, found in enumerate(everyones):
            owner = (rank + 1) % world.size
            if MIRROR in found and found[MIRROR] != everyones[owner][OWN]:
                raise RecoveryError(f"rank {rank} mirrors the slices of rank {owner}, and they are not the same")

    # --- after a loss

    def _recover(self) -> None:
        """Meet the ranks that are there now, and hold what belongs to the version that counts."""
        member = membership()
        assert member is not None
        began = time.time()
        reach("lost")
        earlier = member.now
        while True:
            self._engine.abandon()
            self._world = None
            mesh = meet(self._engine.mesh_shape)
            met = time.time()
            try:
                self._engine.mesh.reconnect(mesh)
                self._connect()
                standings, version = self._settle()
                self._engine.meet_anew()
                assert self._world is not None
                agree(self._world, torch.zeros(1, dtype=torch.float64))
            except RecoveryError as error:
                member.give_up(str(error))
            except RuntimeError as error:
                if isinstance(error, OnecopyError) and not isinstance(error, CollectiveError):
                    raise
                continue
            break
        self._version = version
        self._knows = [standing.knows for standing in standings]
        # Where a rank was lost in a save, some may hold it for made.
        self._saved = min((standing.saved for standing in standings if standing.knows), default=0)
        replaced = (self._rank,) if earlier is None else _replaced(earlier, member.now)
        self.repairs.append(Repair(self.steps, replaced, began, met, time.time()))
        if earlier is not None:
            _log.warning("lost %s after step %d; back after %.2f s", *_words(self.repairs[-1]))
        reach("settled")

    def _settle(self) -> tuple[list[Standing], int]:
        world = self._world
        assert world is not None
        reach("vote")
        knows = self._version >= 0 and (not self._knows or self._knows[world.rank])
        standing = Standing(self._version, knows, self._engine.mesh.shard.rank, self._saved)
        standings, version = settle(world, self._engine, standing, self._held, self._catch_up)
        reach("states")
        new = [rank for rank, found in enumerate(standings) if found.version < 0]
        if new:
            self._hand_over_capsules(new)
        return standings, version

    def _catch_up(self) -> None:
        """Others have passed the commit point to which this rank has come, too."""
        self._engine.open_step(None)
        self._advance()
        self._engine.close_step()
        reach("caught up")

    def _hand_over_capsules(self, new: list[int]) -> None:
        world = self._world
        assert world is not None
        before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        own, held = self._capsules
        told: dict[tuple[int, str], Tensor | None] = {}
        if world.rank not in new:
            told = {(after, OWN): held} if after in new else {}
            if before in new:
                told[before, MIRROR] = own
        everyones = {key: capsule for others in world.exchange_objects(told) for key, capsule in others.items()}
        if world.rank in new:
            own, held = everyones.get((world.rank, OWN)), everyones.get((world.rank, MIRROR))
            self._capsules = (own, held)
            if own is None:
                _log.warning("rank %d: its random numbers were lost with rank %d; they begin anew", world.rank, before)


def resilient(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    checkpoints: str | Path | None = None,
    save_every: int = 0,
    keep: int = 2,
    **kept: Any,
) -> Run:
    """A run that survives the loss of ranks: a lost rank's states come back from its peers' memory.

    That needs a second rank to hold every slice, `onecopy.shard(..., mirror=True)` or ``copies=2``, and somebody who
    starts another process in the place of one that has ended, `onecopy run`. Else, and where all holders of a slice are
    lost, ranks are started again, and the run goes on from the newest whole checkpoint.

    Args:
        model: that `onecopy.shard` returned.
        optimizer: of its parameters; updates each element by itself, as AdamW and SGD do.
        scheduler, scaler: are given back to newcomers, and put back where a step is done over.
        checkpoints: a directory; where no peer holds anything, the run goes on from the newest one in there.
        save_every: steps between checkpoints that the loop saves there by itself; 0: none.
        keep: how many of these stay.
        kept: other objects that change from step to step and are alike on all ranks, under names of your choice: with
            `state_dict()` and `load_state_dict()`, or dicts.

    Returns:
        The `Run`: its `loop` gives the batches, and its `step` takes the place of the optimizer's.

    Raises:
        SettingsError: for what cannot be brought back.
    """
    engine = engine_of(model)
    if engine.mesh.tensor.size > 1:
        raise SettingsError("onecopy.resilient cannot bring back ranks of a tensor-parallel model yet")
    if engine.lays_whole:
        raise SettingsError(
            "onecopy.resilient cannot bring back parameters that lie whole in one rank's slice yet: shard without "
            "whole= and without optimizers that need whole matrices (Muon)"
        )
    if engine.stores is not None and engine.stores.optimizer is not None:
        raise SettingsError(
            "onecopy.resilient cannot bring back slices that rest in files yet: shard without offload= to a directory"
        )
    _check_mesh(engine)
    if save_every and checkpoints is None:
        raise SettingsError("save_every= needs checkpoints=, a directory")
    check_optimizer(engine, optimizer)
    return Run(
        model,
        optimizer,
        scaler=scaler,
        kept={"scheduler": scheduler, **kept},
        checkpoints=None if checkpoints is None else Path(checkpoints),
        save_every=save_every,
        keep=keep,
    )


def _check_mesh(engine: Engine) -> None:
    """Raise `SettingsError` if the mesh cannot be made anew from its sizes and names."""
    if engine.mesh_shape is None or membership() is None:
        return
    _, sizes, names = engine.mesh_shape
    ranks = torch.arange(dist.get_world_size()).view(-1)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    axes = {name: axis for axis, name in enumerate(names)}
    own = engine.mesh.shard
    axis = axes.get("shard")
    in_order = len(names) == len(sizes) and math.prod(sizes) == len(ranks) and axis is not None
    if in_order and own.size > 1:
        first = dist.get_rank() - own.rank * strides[axis or 0]
        in_order = own.ranks == tuple(first + place * strides[axis or 0] for place in range(own.size))
    if not in_order:
        raise SettingsError(
            f"onecopy.resilient makes the mesh anew after a loss, and can do so for all ranks in order and axes named "
            f'"shard" and "replicate"; found sizes {sizes}, names {names}. Pass onecopy.shard(copies=...) instead.'
        )


def _is_loss(error: BaseException) -> bool:
    """Whether a rank is lost; shown by an error of a collective, or known from the launcher within a moment."""
    member = membership()
    if member is None or member.now is None or not isinstance(error, RuntimeError):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CollectiveError):
            return True
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, UsageError):
        return False
    until = time.monotonic() + _A_MOMENT
    while time.monotonic() < until:
        if member.newest > member.now.number:
            return True
        time.sleep(0.005)
    return False


def _replaced(earlier: Generation | None, now: Generation | None) -> tuple[int, ...]:
    if earlier is None or now is None:
        return ()
    pairs = enumerate(zip(earlier.members, now.members, strict=False))
    return tuple(rank for rank, (before, after) in pairs if before != after)


def _words(repair: Repair) -> tuple[str, int, float]:
    ranks = ", ".join(map(str, repair.ranks))
    return f"rank{'s' if len(repair.ranks) != 1 else ''} {ranks}", repair.step, repair.seconds
