"""Handing on: capsules, where ranks have met anew.

Each rank draws from a **stream** of random numbers, which has a number: at first the rank's. A newcomer goes on with
the stream of the rank in whose place it is. Where nobody takes that place, all keep the stream, and the next rank that
makes them more goes on with it. So none begins a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onecopy.comm.mesh import Axis
from onecopy.resilience import ring
from onecopy.resilience.settling import Standing

Capsules = tuple[Tensor | None, Tensor | None]
"""A rank's, and that of the rank that it holds."""

_log = logging.getLogger("onecopy")


@dataclass(frozen=True)
class Streams:
    """Alike on all ranks.

    Attributes:
        of_ranks: the number of each rank's stream.
        free: the streams that no rank draws from, each as the capsule of the rank that was lost.
    """

    of_ranks: tuple[int, ...] = ()
    free: dict[int, Tensor] = field(default_factory=dict)


def regroup(
    world: Axis, standings: Sequence[Standing], capsules: Capsules, streams: Streams, *, stay: bool
) -> tuple[Capsules, Streams]:
    """Hand capsules to the ranks to which they belong now; every rank calls it.

    Args:
        stay: all but newcomers are the ranks that they were.
    """
    seats = [found.seat if found.version >= 0 else None for found in standings]
    source = next(rank for rank, seat in enumerate(seats) if seat is not None)
    own, held = capsules
    seat = seats[world.rank]
    told = world.exchange_objects((own, held, streams) if seat is not None else (None, None, Streams()))
    before: Streams = told[source][2]
    numbers: list[int | None] = [None] * world.size
    known: dict[int, Tensor | None] = dict(before.free)
    for rank, seat in enumerate(seats):
        if seat is not None:
            numbers[rank] = before.of_ranks[seat.rank]
            known[before.of_ranks[seat.holds]] = told[rank][1]
    for rank, number in enumerate(numbers):
        if number is not None:
            known[number] = told[rank][0]
    left = sorted({*before.of_ranks, *before.free} - set(numbers))
    for rank, number in enumerate(numbers):
        if number is None:
            chosen = before.of_ranks[rank] if stay else left[0] if left else max(before.of_ranks) + 1
            left = [one for one in left if one != chosen]
            numbers[rank] = chosen
            if rank == world.rank and known.get(chosen) is None:
                _log.warning("rank %d: its random numbers were lost with other ranks; they begin anew", rank)
    found = [number for number in numbers if number is not None]
    after = known.get(found[ring.held(world.rank, world.size)]) if world.size > 1 else None
    free = {number: capsule for number in left if (capsule := known.get(number)) is not None}
    return (known.get(found[world.rank]), after), Streams(tuple(found), free)
