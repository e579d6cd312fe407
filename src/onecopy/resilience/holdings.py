"""Holdings: what this rank holds for itself and for another (`ring.py`), and how a step changes both alike.

    prepare   this rank's holder gets the final gradients of what it mirrors, and a capsule
    apply     this rank's slice and its mirror are updated; no message

Where ranks have met anew each gets what it lacks: slices of its place (`settling.py`), or slices cut for another
number of ranks (`recutting.py`), and capsules (`handing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.comm.mesh import Axis
from onecopy.errors import RecoveryError, UsageError
from onecopy.resilience import ring
from onecopy.resilience.capsules import Belongings, is_unscaled, unscaled_alike
from onecopy.resilience.handing import Capsules, Streams, regroup
from onecopy.resilience.mirrors import Mirror, own_gradients
from onecopy.resilience.points import reach
from onecopy.resilience.recutting import Draft, draft, layouts_for, seat_of
from onecopy.resilience.settling import MIRROR, OWN, Seat, Standing, all_come, first_mirrors, hand_over, plan_transfers
from onecopy.resilience.slices import Slices, group_values, own_slices
from onecopy.sharding.engine.engine import Engine

_DTYPES: Final = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Holdings:
    """See the file's first lines.

    Attributes:
        held: by `OWN` and `MIRROR`, the slices.
        seat: for which they were cut.
        cut: how often they were cut anew; -1: this process is new and holds nothing.
        capsules: as they were when the last step was made.
        streams: of random numbers.
    """

    def __init__(
        self, engine: Engine, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, belongings: Belongings
    ) -> None:
        self.held: dict[str, Slices] = {}
        self.seat: Seat | None = None
        self.cut = 0
        self.capsules: Capsules = (None, None)
        self.streams = Streams()
        self._engine = engine
        self._optimizer = optimizer
        self._scaler = scaler
        self._belongings = belongings
        self._world: Axis | None = None
        self._mirror: Mirror | None = None
        self._coming: Capsules = (None, None)
        self._draft: tuple[Draft, Capsules, Streams] | None = None

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
        engine = self._engine
        self._world = engine.mesh.all_ranks()
        now = seat_of(engine, self._world)
        if self.seat is None or self.cut < 0:
            if self.seat not in (None, now):
                # The script of this process ran for a seat that it does not get.
                engine.recut(layouts_for(engine, now), now.place, None)
                self._mirror = None
            self.seat = now
        if engine.mirror and self._mirror is None and self.seat == now and now.places > 1:
            self._mirror = Mirror(engine, self._optimizer, now.mirrors)
        self._hold()

    def _hold(self) -> None:
        self.held = {OWN: own_slices(self._engine, self._optimizer)}
        if self._mirror is not None:
            self._mirror.count()
            self.held[MIRROR] = self._mirror
        else:
            self._engine.meter.set("mirror", 0)

    def begin(self) -> None:
        """Before the first step: mirrors are filled, and capsules sent."""
        if self._mirror is not None:
            hand_over(self.world, self._engine, first_mirrors(self.world.size), self.held)
        self.capsules = self._exchange(with_gradients=False)
        self.streams = Streams(tuple(range(self.world.size)))

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
        """Send this rank's holder its capsule, and its gradients where that one mirrors it."""
        world = self.world
        if world.size == 1:
            return self._belongings.capsule(), None
        before, after = ring.holder(world.rank, world.size), ring.held(world.rank, world.size)
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
            owner = ring.held(rank, self.world.size)
            if MIRROR in found and found[MIRROR] != everyones[owner][OWN]:
                raise RecoveryError(f"rank {rank} mirrors the slices of rank {owner}, and they are not the same")

    # --- where ranks have met anew

    def take(self, standings: Sequence[Standing], version: int, cut: int) -> None:
        """Hold what belongs to this rank's seat. Every rank calls it, and all but newcomers hold what counts.

        Args:
            version, cut: those that count.

        Raises:
            RecoveryError: on every rank, if some slice is held by nobody.
            CollectiveError: if a rank is lost meanwhile.
        """
        world = self.world
        self._draft = None
        places, stride = self._engine.mesh.shard.size, ring.stride(world.size)
        stay = all(
            found.version < 0 or found.seat == Seat(rank, world.size, found.place, places, stride)
            for rank, found in enumerate(standings)
        )
        capsules, streams = regroup(world, standings, self.capsules, self.streams, stay=stay)
        if stay:
            mirrored = bool(self._engine.mirror) and places > 1
            transfers = plan_transfers(standings, shards=places, mirrored=mirrored, stride=stride)
            hand_over(world, self._engine, transfers, self.held)
            self.capsules, self.streams, self.cut = capsules, streams, cut
            return
        made = draft(world, self._engine, self._optimizer, standings, self.held, version, cut + 1)
        # Before all have come to the point from which on each relies on everyone's.
        self._draft = made, capsules, streams
        reach("drafted")
        all_come(world)
        self._switch()

    def switch_to(self, cut: int, version: int) -> int:
        """Take the slices that were drafted if they are of that cut; local. Returns the version of what is held then.

        Args:
            version: of what is held now.
        """
        if self._draft is None or self._draft[0].cut != cut:
            # A newcomer, who has not come as far.
            assert version < 0
            return version
        return self._switch()

    def _switch(self) -> int:
        assert self._draft is not None
        (made, self.capsules, self.streams), self._draft = self._draft, None
        made.install(self._engine, self._optimizer)
        self._mirror = made.mirror
        self.seat = made.seat
        self.cut = made.cut
        self._hold()
        reach("switched")
        return made.version
