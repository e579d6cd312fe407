"""Holdings: what this rank holds for itself and for the rank after it, and how a step changes both alike.

prepare   the rank before gets the final gradients of what it mirrors of this one, and a capsule
apply     this rank's slice and its mirror are updated; no message
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.comm.mesh import Axis
from onecopy.errors import RecoveryError, UsageError
from onecopy.resilience.capsules import Belongings, is_unscaled, unscaled_alike
from onecopy.resilience.points import reach
from onecopy.resilience.settling import MIRROR, OWN, first_mirrors, hand_over
from onecopy.resilience.slices import Mirror, Slices, group_values, own_gradients, own_slices
from onecopy.sharding.engine.engine import Engine

_DTYPES: Final = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)

_log = logging.getLogger("onecopy")

Capsules = tuple[Tensor | None, Tensor | None]
"""This rank's, and that of the rank after it."""


class Holdings:
    """See the file's first lines.

    Attributes:
        held: by `OWN` and `MIRROR`, the slices.
        capsules: as they were when the last step was made.
    """

    def __init__(
        self, engine: Engine, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, belongings: Belongings
    ) -> None:
        self.held: dict[str, Slices] = {}
        self.capsules: Capsules = (None, None)
        self._engine = engine
        self._optimizer = optimizer
        self._scaler = scaler
        self._belongings = belongings
        self._world: Axis | None = None
        self._mirror: Mirror | None = None
        self._coming: Capsules = (None, None)

    @property
    def world(self) -> Axis:
        """All ranks, as they have met last."""
        assert self._world is not None
        return self._world

    @property
    def is_met(self) -> bool:
        """Whether ranks have met, and none of them is known to be lost."""
        return self._world is not None

    def part(self) -> None:
        """The ranks that had met do not stay together."""
        self._world = None

    def connect(self) -> None:
        """What follows from the process groups as they are now."""
        mesh = self._engine.mesh
        self._world = mesh.all_ranks()
        if self._engine.mirror and self._mirror is None:
            self._mirror = Mirror(self._engine, self._optimizer, (mesh.shard.rank + 1) % mesh.shard.size)
        self.held = {OWN: own_slices(self._engine, self._optimizer)}
        if self._mirror is not None:
            self.held[MIRROR] = self._mirror

    def begin(self) -> None:
        """Before the first step: mirrors are filled, and capsules sent."""
        if self._mirror is not None:
            hand_over(self.world, self._engine, first_mirrors(self.world.size), self.held)
        self.capsules = self._exchange(with_gradients=False)

    def prepare(self) -> None:
        """All that a step sends but the agreement: afterwards this rank and the one before it can make it."""
        scaler = self._scaler
        if scaler is not None and scaler.is_enabled() and not is_unscaled(scaler, self._optimizer):
            scaler.unscale_(self._optimizer)
        self._engine.begin_step()
        reach("reduced")
        self._coming = self._exchange(with_gradients=True)
        reach("sent")

    def _exchange(self, *, with_gradients: bool) -> Capsules:
        """Send the rank before this one its capsule, and its gradients where that one mirrors it."""
        world = self.world
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

    def apply(self, *, update: bool) -> None:
        """Past the commit point: step the optimizer on both, or drop the gradients; nothing here waits for a rank.

        Raises:
            UsageError: if the optimizer's own step sends messages.
        """
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
        self.capsules = self._coming

    def _step_one(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    def check(self) -> None:
        """Hold every mirror against what it mirrors, by checksums; between steps, on all ranks.

        Raises:
            RecoveryError: on every rank, if one differs.
        """
        manifests = {kind: slices.describe() for kind, slices in self.held.items()}
        everyones = self.world.exchange_objects({kind: found.checksums for kind, found in manifests.items()})
        for rank, found in enumerate(everyones):
            owner = (rank + 1) % self.world.size
            if MIRROR in found and found[MIRROR] != everyones[owner][OWN]:
                raise RecoveryError(f"rank {rank} mirrors the slices of rank {owner}, and they are not the same")

    def hand_over_capsules(self, new: list[int]) -> None:
        """Ranks that are ``new`` get the capsules of the ranks whose places they have; every rank calls it."""
        world = self.world
        before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        own, held = self.capsules
        told: dict[tuple[int, str], Tensor | None] = {}
        if world.rank not in new:
            told = {(after, OWN): held} if after in new else {}
            if before in new:
                told[before, MIRROR] = own
        everyones = {key: capsule for others in world.exchange_objects(told) for key, capsule in others.items()}
        if world.rank in new:
            own, held = everyones.get((world.rank, OWN)), everyones.get((world.rank, MIRROR))
            self.capsules = (own, held)
            if own is None:
                _log.warning("rank %d: its random numbers were lost with rank %d; they begin anew", world.rank, before)
