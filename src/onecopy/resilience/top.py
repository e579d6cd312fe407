"""Top: between two steps, what a rank is to begin the next one with, and what newcomers lack of it.

A step that is done over begins with objects, buffers and random numbers as they were before its first attempt. Whoever
is new is told them by the first rank that knows them, and goes on with the random numbers of the rank that was lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.random import pack, put_generators, take_generators, unpack
from onecopy.comm.mesh import Axis
from onecopy.resilience.capsules import Belongings
from onecopy.resilience.points import reach
from onecopy.resilience.settling import all_come


class Top:
    """What this rank begins a step with.

    Attributes:
        knows: for each rank, whether it has what users keep; empty before ranks have met.
        is_informed: whether this one has.
    """

    def __init__(self, belongings: Belongings) -> None:
        self.knows: list[bool] = []
        self.is_informed = True
        self._belongings = belongings
        self._snapshot: dict[str, Any] = {}
        self._generators: dict[str, Any] = {}
        # The version that the snapshot is of.
        self._at = -1
        self._is_redone = False

    def come(self, version: int, counts: dict[str, Any]) -> None:
        """A step begins, or begins again.

        Args:
            version: of the slices.
            counts: what newcomers are to know of the run itself.
        """
        self._is_redone = self._at == version
        if not self.is_informed:
            return
        if self._is_redone:
            self._belongings.restore(self._snapshot)
            self._belongings.put_back_buffers()
            return
        self._snapshot = self._belongings.snapshot()
        self._snapshot["buffers"] = self._belongings.remember_buffers()
        self._snapshot["run"] = counts
        self._at = version

    def begin_attempt(self) -> None:
        """Random numbers are drawn from here on, the same ones in each attempt at a step."""
        if self._is_redone:
            put_generators(self._generators)
        else:
            self._generators = take_generators()

    def tell_newcomers(self, world: Axis, version: int, capsule: Tensor | None) -> dict[str, Any] | None:
        """The first rank that knows what users keep tells those that do not; every rank calls it.

        Args:
            capsule: of the rank whose place this one has.

        Returns:
            What a newcomer is to know of the run itself; None on the others.
        """
        reach("user")
        source = self.knows.index(True)
        own = pack(self._snapshot) if world.rank == source else torch.empty(0, dtype=torch.uint8)
        count = world.exchange_objects(own.numel())[source]
        lacking = [rank for rank, knows in enumerate(self.knows) if not knows]
        came = torch.empty(count if world.rank in lacking else 0, dtype=torch.uint8)
        sent = [(own, rank) for rank in lacking] if world.rank == source else []
        received = [(came, source)] if world.rank in lacking else []
        world.exchange_slices(sent, received, "states").finish()
        reach("user sent")
        all_come(world)
        counts = None
        if world.rank in lacking:
            self._snapshot = unpack(came)
            self._belongings.restore(self._snapshot)
            self._belongings.put_snapshot_buffers(self._snapshot["buffers"])
            counts = self._snapshot["run"]
            if capsule is not None:
                self._belongings.open_capsule(capsule)
            self._belongings.remember_buffers()
            self.is_informed = True
        self.knows = [True] * world.size
        # A newcomer begins this step; it does not do it over.
        self._at = version
        return counts
