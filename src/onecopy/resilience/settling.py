"""Settling: what ranks do once they have met anew, so that all of them hold their slices of one version.

1. All tell how far they are. The highest **version** (steps committed) that anyone has reached counts: whoever reached
   it knew that every rank had its final gradients, and its mirror's.
2. Who is one behind applies the gradients that it has kept. It can be no more than one: to pass a commit point needs
   every rank's word.
3. Newcomers get their own slices from another holder of them, and what they mirror from its owner, with checksums.
   Where the number of ranks has changed, or their order, slices are cut anew instead (`recutting.py`).

Whatever fails meanwhile, all meet again and begin here anew; what was done is not done twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.errors import RecoveryError
from onecopy.resilience import ring
from onecopy.resilience.slices import Manifest, Slices, checksum
from onecopy.sharding.engine.engine import Engine

OWN: Final = "own"
MIRROR: Final = "mirror"

_log = logging.getLogger("onecopy")


@dataclass(frozen=True)
class Seat:
    """Where a rank is among others.

    Attributes:
        rank, ranks: its number, and how many there are.
        place, places: likewise on the shard axis.
        stride: ranks between a rank and its holder (`ring.py`).
    """

    rank: int
    ranks: int
    place: int
    places: int
    stride: int = 1

    @property
    def holds(self) -> int:
        """The rank of which it holds what that one has."""
        return (self.rank + self.stride) % self.ranks

    @property
    def mirrors(self) -> int:
        """The place of the slices that it mirrors, where it mirrors any."""
        return (self.place + self.stride) % self.places

    @property
    def copies(self) -> int:
        """How many ranks hold each slice."""
        return self.ranks // self.places


@dataclass(frozen=True)
class Standing:
    """What a rank holds.

    Attributes:
        version: steps that it has committed; -1 for a newcomer, who holds nothing.
        knows: it has what users keep, of that version or from before its attempt at the next step.
        place: on the shard axis, as ranks have met now.
        saved: steps that the last checkpoint in whose making it took part to the end has.
        seat: for which its slices were cut.
        since: Unix time in seconds from which its work is lost; inf where it was behind others, or new.
    """

    version: int
    knows: bool
    place: int
    saved: int = 0
    seat: Seat | None = None
    since: float = math.inf


class Transfer(NamedTuple):
    """Slices that go from rank to rank: as what the sender holds them, and as what the receiver will."""

    sender: int
    receiver: int
    taken: str
    given: str


def plan_transfers(standings: Sequence[Standing], *, shards: int, mirrored: bool, stride: int = 1) -> list[Transfer]:
    """From whom newcomers get what they are to hold.

    Args:
        standings: of all ranks.
        shards: N, the places on the shard axis.
        mirrored: the rank at place p - ``stride`` mirrors place p.

    Raises:
        RecoveryError: if nobody holds some slice any more.
    """
    owners: dict[int, int] = {}
    for rank, standing in enumerate(standings):
        if standing.version >= 0:
            owners.setdefault(standing.place, rank)

    def holder(place: int, lost: int) -> tuple[int, str]:
        if place in owners:
            return owners[place], OWN
        before = (place - stride) % shards
        if mirrored and before in owners:
            return owners[before], MIRROR
        raise RecoveryError(
            f"rank {lost} cannot be brought back: every rank that held slice {place} of {shards} is lost"
        )

    transfers = []
    for rank, standing in enumerate(standings):
        if standing.version < 0:
            transfers.append(Transfer(*_from(holder(standing.place, rank), rank), OWN))
            if mirrored:
                transfers.append(Transfer(*_from(holder((standing.place + stride) % shards, rank), rank), MIRROR))
    return transfers


def _from(held: tuple[int, str], receiver: int) -> tuple[int, int, str]:
    return held[0], receiver, held[1]


def first_mirrors(size: int) -> list[Transfer]:
    """What fills the mirrors before the first step: every rank's own slices, to their holder."""
    return [Transfer(rank, ring.holder(rank, size), OWN, MIRROR) for rank in range(size)]


def hand_over(world: Axis, engine: Engine, transfers: Sequence[Transfer], held: Mapping[str, Slices]) -> None:
    """Carry transfers out; every rank calls it.

    Args:
        held: this rank's `OWN`, and `MIRROR` where it has one.

    Raises:
        RecoveryError: on every rank, if what came to one is not what was sent.
        CollectiveError: if a rank is lost meanwhile.
    """
    if not transfers:
        return
    described: dict[str, Manifest] = {}
    own: dict[int, Manifest] = {}
    for number, transfer in enumerate(transfers):
        if transfer.sender == world.rank:
            if transfer.taken not in described:
                described[transfer.taken] = held[transfer.taken].describe()
            own[number] = described[transfer.taken]
    manifests = {number: found for others in world.exchange_objects(own) for number, found in others.items()}
    sent: list[tuple[Tensor, int]] = []
    received: list[tuple[Tensor, int]] = []
    checks: list[tuple[Tensor, int]] = []
    with ExitStack() as stack:
        if any(t.receiver == world.rank and t.given == OWN for t in transfers):
            for bucket in engine.buckets:
                stack.enter_context(bucket.rewritten())
        for number, transfer in enumerate(transfers):
            if transfer.sender == world.rank:
                sent += [(tensor.detach().cpu(), transfer.receiver) for tensor in held[transfer.taken].tensors()]
            if transfer.receiver == world.rank:
                room = held[transfer.given].make_room(manifests[number].states)
                received += [(tensor, transfer.sender) for tensor in room]
                checks += zip(room, manifests[number].checksums, strict=True)
        arriving = [(tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu"), s) for tensor, s in received]
        world.exchange_slices(sent, arriving, "states").finish()
        for (tensor, _), (came, _) in zip(received, arriving, strict=True):
            if came is not tensor:
                tensor.copy_(came)
    damaged = sum(checksum(tensor) != expected for tensor, expected in checks)
    if agree(world, torch.tensor([float(damaged)])) > 0:
        raise RecoveryError("slices that were handed over did not come as they were sent: a checksum differs")


def agree(world: Axis, values: Tensor) -> float:
    """The sum of every rank's value; returns once all ranks have come here."""
    if message := world.combine(values, "agree"):
        message.finish()
    return float(values[0])


def all_come(world: Axis) -> None:
    """Return once all ranks have come here."""
    agree(world, torch.zeros(1, dtype=torch.float64))


def reach_the_highest(
    world: Axis, version: int, cut: int, *, catch_up: Callable[[], None], switch: Callable[[int], int]
) -> tuple[int, int]:
    """Come to the version and the cut of slices that count; every rank calls it.

    Args:
        version: of this rank's slices.
        cut: how often they were cut anew.
        catch_up: makes the step that this rank has prepared.
        switch: takes the slices that this rank has drafted, if they are of that cut. Returns the version of those that
            it holds.

    Returns:
        The version and the cut that count.

    Raises:
        RecoveryError: on every rank, if all are newcomers.
    """
    reached = world.exchange_objects((version, cut))
    target, cuts = max(found for found, _ in reached), max(found for _, found in reached)
    if target < 0:
        raise RecoveryError("all ranks are lost")
    if cut < cuts:
        version = switch(cuts)
    if 0 <= version < target:
        assert version == target - 1, f"one rank is at {target} and this one at {version}"
        catch_up()
    return target, cuts
