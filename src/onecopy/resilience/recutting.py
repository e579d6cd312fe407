"""Recutting: slices for another number of ranks, cut in memory out of those that ranks hold.

Where an element lies is a function of the model and of the number of ranks (`sharding/bucket/layout.py`), for
checkpoints as for this. So each rank knows of which old slices its new one consists, and who holds them:

    old, 4 ranks   |    0    |    1    |    2    |    3    |      rank 2 is lost, and rank 1 mirrors its slice
    new, 3 ranks   |      0      |      1      |      2      |

Cutting anew is a commit, as a step is (`commits.py`). All ranks **draft** the new slices beside the old ones, and agree
that everything has come as it was sent. Then each switches to its draft, with no message. After a loss in between the
highest number of cuts that any rank has reached counts: who is behind switches, too, or all drop their drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.comm.mesh import Axis
from onecopy.errors import RecoveryError
from onecopy.resilience import ring
from onecopy.resilience.mirrors import Mirror, Twin
from onecopy.resilience.settling import MIRROR, OWN, Seat, Standing, agree
from onecopy.resilience.slices import Slices, checksum, parameters_of
from onecopy.sharding.bucket.layout import Layout
from onecopy.sharding.engine.engine import Engine


class Move(NamedTuple):
    """What two slices have in common goes from a rank to a rank, which may be the same.

    Attributes:
        taken: as what the sender holds it.
        given: as what the receiver will.
        old, new: places of the two slices on the shard axis, as it was and as it will be.
    """

    sender: int
    receiver: int
    taken: str
    given: str
    old: int
    new: int


@dataclass
class Draft:
    """New slices beside the old ones.

    Attributes:
        version: of which they are.
        cut: how often slices will have been cut anew.
        seat: for which they were cut.
        layouts: how each bucket's elements lie.
        slices: this rank's own, and those that it is to mirror.
    """

    version: int
    cut: int
    seat: Seat
    layouts: Sequence[Layout]
    slices: dict[str, Twin]

    @property
    def mirror(self) -> Mirror | None:
        """The new mirror, where there is one."""
        found = self.slices.get(MIRROR)
        assert found is None or isinstance(found, Mirror)
        return found

    def install(self, engine: Engine, optimizer: Optimizer) -> None:
        """Let this rank's own slices be these; local."""
        own = self.slices[OWN]
        engine.recut(self.layouts, self.seat.place, own.masters)
        for parameter, drafted in zip(parameters_of(optimizer), own.parameters, strict=True):
            if drafted in own.optimizer.state:
                optimizer.state[parameter] = own.optimizer.state[drafted]
            else:
                optimizer.state.pop(parameter, None)


def seat_of(engine: Engine, world: Axis) -> Seat:
    """This rank's, as ranks have met now."""
    shard = engine.mesh.shard
    return Seat(world.rank, world.size, shard.rank, shard.size, ring.stride(world.size))


def layouts_for(engine: Engine, seat: Seat) -> list[Layout]:
    """How each bucket's elements lie among as many ranks."""
    return [bucket.layout_among(seat.places, seat.copies) for bucket in engine.buckets]


def plan_moves(
    standings: Sequence[Standing], *, places: int, mirrored: bool, mirrors: bool, stride: int = 1
) -> list[Move]:
    """Of which old slices new ones are made, and who holds those.

    Args:
        standings: of all ranks.
        places: on the shard axis, as ranks have met now.
        mirrored: old slices have mirrors.
        mirrors: new slices are to have them, the rank at place p - ``stride`` that of place p.

    Raises:
        RecoveryError: if nobody holds some slice any more.
    """
    holders: dict[int, list[tuple[int, str]]] = {}
    seats = {rank: found.seat for rank, found in enumerate(standings) if found.version >= 0 and found.seat is not None}
    before = next(iter(seats.values()))
    for rank, seat in seats.items():
        holders.setdefault(seat.place, []).append((rank, OWN))
        if mirrored and seat.places > 1:
            holders.setdefault(seat.mirrors, []).append((rank, MIRROR))
    if missing := [place for place in range(before.places) if place not in holders]:
        raise RecoveryError(f"every rank that held slice {missing[0]} of {before.places} is lost")

    moves = []
    for receiver, standing in enumerate(standings):
        wanted = [(OWN, standing.place)]
        if mirrors and places > 1:
            wanted.append((MIRROR, (standing.place + stride) % places))
        for given, new in wanted:
            for old in range(before.places):
                # What a rank holds itself it need not be sent.
                sender, taken = min(holders[old], key=lambda holder: (holder[0] != receiver, holder[1] != OWN))
                moves.append(Move(sender, receiver, taken, given, old, new))
    return moves


def draft(
    world: Axis,
    engine: Engine,
    optimizer: Optimizer,
    standings: Sequence[Standing],
    held: Mapping[str, Slices],
    version: int,
    cut: int,
) -> Draft:
    """Draft the slices that this rank is to hold among the ranks that have met; every rank calls it.

    Args:
        held: this rank's `OWN`, and `MIRROR` where it has one.
        version: of the slices.
        cut: how often they will have been cut anew.

    Raises:
        RecoveryError: on every rank, if nobody holds some slice, or if what came to a rank is not what was sent.
        CollectiveError: if a rank is lost meanwhile.
    """
    seat = seat_of(engine, world)
    layouts = layouts_for(engine, seat)
    slices = {OWN: Twin(engine, optimizer, seat.place, layouts)}
    if engine.mirror and seat.places > 1:
        slices[MIRROR] = Mirror(engine, optimizer, seat.mirrors, layouts)
    mirrored = bool(engine.mirror)
    moves = plan_moves(standings, places=seat.places, mirrored=mirrored, mirrors=mirrored, stride=seat.stride)
    source = next(rank for rank, standing in enumerate(standings) if standing.version >= 0)
    states = world.exchange_objects(held[OWN].describe_states() if world.rank == source else None)[source]
    assert states is not None
    for made in slices.values():
        made.make_room(copy.deepcopy(states))
        # Until it takes the place of what is held now.
        engine.meter.add("mirror", made.held_bytes)
    before = standings[source].seat
    assert before is not None
    _fill(world, engine, moves, held, slices, layouts_for(engine, before), layouts)
    return Draft(version, cut, seat, layouts, slices)


def _fill(
    world: Axis,
    engine: Engine,
    moves: Sequence[Move],
    held: Mapping[str, Slices],
    made: Mapping[str, Slices],
    old: Sequence[Layout],
    new: Sequence[Layout],
) -> None:
    """Carry the moves out, one bucket after the other: what goes from rank to rank for one move is one message."""
    expected: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], int] = {}
    for number in range(len(engine.buckets)):
        sent: list[tuple[Tensor, int]] = []
        received: list[tuple[Tensor, int]] = []
        arriving: list[tuple[int, Tensor, list[Tensor]]] = []
        for index, move in enumerate(moves):
            if world.rank not in (move.sender, move.receiver):
                continue
            overlaps = old[number].overlaps(move.old, new[number], move.new)
            taken = given = []
            if world.rank == move.sender:
                parts = [(held[move.taken].parts(number, o.index), o) for o in overlaps]
                taken = [_bytes(part[o.first : o.first + o.numel]) for own, o in parts for part in own]
            if world.rank == move.receiver:
                parts = [(made[move.given].parts(number, o.index), o) for o in overlaps]
                given = [_bytes(part[o.second : o.second + o.numel]) for own, o in parts for part in own]
            if move.sender == move.receiver:
                for source, target in zip(taken, given, strict=True):
                    target.copy_(source)
            elif taken:
                message = torch.cat(taken).cpu()
                expected[number, index] = checksum(message)
                sent.append((message, move.receiver))
            elif given:
                message = torch.empty(sum(target.numel() for target in given), dtype=torch.uint8)
                received.append((message, move.sender))
                arriving.append((index, message, given))
        if sent or received:
            world.exchange_slices(sent, received, "states").finish()
        for index, message, targets in arriving:
            found[number, index] = checksum(message)
            for target, came in zip(targets, message.split([target.numel() for target in targets]), strict=True):
                target.copy_(came)
    everyones = {key: total for others in world.exchange_objects(expected) for key, total in others.items()}
    damaged = sum(everyones[key] != total for key, total in found.items())
    if agree(world, torch.tensor([float(damaged)])) > 0:
        raise RecoveryError("slices that were cut anew did not come as they were sent: a checksum differs")


def _bytes(part: Tensor) -> Tensor:
    return part.detach().view(torch.uint8)
