"""Commits: what all ranks do, or none; and how ranks come to the same count of them after a loss.

    prepare   whatever has to be sent
    agree     all ranks tell that they have prepared. Who has heard all others knows: everyone can do it
    apply     do it; no message
    advance   the version counts up

After a loss the highest version that any rank has reached counts, and one that has not heard all applies what it has
prepared (`settling.py`). So what one rank has done is done by all, and what none has done is done over.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onecopy.errors import CollectiveError, OnecopyError, RecoveryError
from onecopy.resilience.holdings import Holdings
from onecopy.resilience.losses import Repair, is_loss, repaired
from onecopy.resilience.meeting import meet, shape_among
from onecopy.resilience.membership import membership
from onecopy.resilience.points import reach
from onecopy.resilience.saves import Saves
from onecopy.resilience.settling import Standing, agree, all_come, reach_the_highest
from onecopy.resilience.top import Top
from onecopy.sharding.engine.engine import Engine

_log = logging.getLogger("onecopy")


class Again(Exception):
    """This attempt at a step is over; it is made again."""


class Commits:
    """See the file's first lines.

    Attributes:
        version: steps and ends of loops that were committed; -1: this process is new and holds nothing.
        steps: how many of them were steps.
        repairs: the losses that were made good while this process was a rank.
        total: the sum over ranks of the values that the last step was given.
        grows: a process waits to be a rank, and all know it.
    """

    def __init__(self, engine: Engine, holdings: Holdings, top: Top, saves: Saves) -> None:
        self.version = 0
        self.steps = 0
        self.repairs: list[Repair] = []
        self.total: list[float] = []
        self.grows = False
        self._engine, self._holdings, self._top, self._saves = engine, holdings, top, saves
        self._pending: Callable[[], None] | None = None
        # The version that an attempt at a step began with, and when.
        self._attempt, self._attempt_began = -1, time.time()

    def begin_attempt(self) -> None:
        """What is done from now on is lost, if nobody commits it."""
        self._attempt, self._attempt_began = self.version, time.time()

    def step(self, values: tuple[float, ...], *, update: bool) -> None:
        """Make a step.

        Raises:
            Again: if no rank has passed the commit point.
            UsageError: if the optimizer's own step sends messages.
        """
        self.total = list(values)

        def apply() -> None:
            self._holdings.apply(update=update)
            self.steps += 1

        def pass_point() -> None:
            self._holdings.prepare()
            self._pending = apply
            told = torch.tensor([float(self._hears_of_more()), *values], dtype=torch.float64)
            self._engine.open_step(partial(self._agree, told))

        self._commit(pass_point)

    def end(self, apply: Callable[[], None]) -> None:
        """Commit something that needs no preparation: the end of a loop.

        Raises:
            Again: if no rank has passed the commit point.
        """

        def pass_point() -> None:
            self._pending = apply
            self._agree(torch.zeros(1, dtype=torch.float64))

        self._commit(pass_point)

    def _commit(self, pass_point: Callable[[], None]) -> None:
        """Returns once what is pending was applied, by whatever way."""
        before = self.version
        try:
            pass_point()
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self.recover()
            if self.version == before:
                raise Again from None
            return
        self._advance()

    def _agree(self, values: Tensor) -> None:
        reach("agree")
        self.grows = agree(self._holdings.world, values) > 0
        if values.numel() > 1:
            self.total = values.tolist()[1:]
        reach("agreed")

    def _hears_of_more(self) -> bool:
        """Whether a process waits to be a rank; the first rank asks."""
        member = membership()
        return member is not None and self._holdings.world.rank == 0 and member.may_grow()

    def grow(self) -> None:
        """Meet the process that waits, between two steps; every rank calls it."""
        member = membership()
        assert member is not None
        assert member.now is not None
        member.ask(member.now.number)
        self.recover()

    def _advance(self) -> None:
        """Past the commit point: nothing here waits for another rank."""
        apply, self._pending = self._pending, None
        assert apply is not None
        apply()
        self.version += 1
        reach("applied")

    # --- after a loss

    def recover(self) -> None:
        """Meet the ranks that are there now, and hold what belongs to the version that counts."""
        member = membership()
        assert member is not None
        began = time.time()
        reach("lost")
        earlier = member.now
        while True:
            self._engine.abandon()
            self._holdings.part()
            mesh = meet(partial(shape_among, self._engine.mesh_shape))
            met = time.time()
            try:
                self._engine.mesh.reconnect(mesh)
                self._holdings.connect()
                standings = self._settle(began)
                self._engine.meet_anew()
                all_come(self._holdings.world)
            except RecoveryError as error:
                member.give_up(str(error))
            except RuntimeError as error:
                if isinstance(error, OnecopyError) and not isinstance(error, CollectiveError):
                    raise
                continue
            break
        self._top.knows = [standing.knows for standing in standings]
        # Where a rank was lost in a save, some may hold it for made.
        self._saves.newest = min((standing.saved for standing in standings if standing.knows), default=0)
        self.grows = False
        since = min(began, *(standing.since for standing in standings))
        self.repairs.append(repaired(earlier, member, self.steps, since, began, met))
        # A loss before the next attempt begins loses nothing that this one has not counted.
        self._attempt_began = self.repairs[-1].settled
        if earlier is not None:
            _log.warning("%s", self.repairs[-1])
        reach("settled")

    def _settle(self, began: float) -> list[Standing]:
        holdings = self._holdings
        reach("vote")
        found = self.version
        since = self._attempt_began if found == self._attempt else began
        version, cut = reach_the_highest(
            holdings.world, self.version, holdings.cut, catch_up=self._catch_up, switch=self._switch
        )
        place = self._engine.mesh.shard.rank
        if found != version:
            since = math.inf
        own = Standing(self.version, self._top.is_informed, place, self._saves.newest, holdings.seat, since)
        standings = holdings.world.exchange_objects(own)
        holdings.take(standings, version, cut)
        self.version = version
        reach("states")
        return standings

    def _catch_up(self) -> None:
        """Others have passed the commit point to which this rank has come, too."""
        self._engine.open_step(None)
        self._advance()
        self._engine.close_step()
        reach("caught up")

    def _switch(self, cut: int) -> int:
        """Others hold slices of that cut already, which this rank may have drafted, too."""
        self.version = self._holdings.switch_to(cut, self.version)
        return self.version
