"""Owners: which rank holds each parameter that is to lie whole in one slice, and what the others take instead.

Pure arithmetic, over the whole model and not bucket by bucket, in two steps:

    whole       the dearest first, each to the rank that has least to compute so far (Graham 1969, longest processing
                time first): the dearest rank has at most the mean and one parameter more
    cuttable    is cut so that ranks with fewer whole elements take more of it, up to one level for all

So what a rank computes is balanced by the first step and what it holds by both, as far as the model allows: a rank
that owns the largest matrix of few cannot do less than that one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import prod
from typing import Final

COMPANION: Final = 2**16
"""Elements up to which a cuttable parameter lies whole beside those that must: another bucket is another message in
every gather and reduce, and costs more than so few elements on one rank."""


_PASSES: Final = 20.0
"""Operations for each element of an update that goes over all of them a few times; for comparing with matrices."""


def cost_of_elements(shape: Sequence[int]) -> float:
    """Operations of an update that goes over the elements a few times."""
    return _PASSES * prod(shape)


def cost_of_newton_schulz(shape: Sequence[int]) -> float:
    """Of five iterations of Muon's on a matrix of m rows and n columns, m the fewer: each 4m²n + 2m³ operations.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), section on runtime.
    """
    if len(shape) < 2:
        return cost_of_elements(shape)
    rows, columns = sorted((shape[0], prod(shape[1:])))
    return 5.0 * (4 * rows**2 * columns + 2 * rows**3)


@dataclass(frozen=True)
class Item:
    """A parameter that one rank is to hold.

    Attributes:
        numel: its elements.
        cost: what its update costs, in any unit.
        unit: those of one unit go to different ranks where that costs nothing, so that all of them send.
    """

    numel: int
    cost: float
    unit: Hashable = None


@dataclass(frozen=True)
class Placing:
    """Where the parameters of one bucket go.

    Attributes:
        whole: names of those that optimizers are to see whole.
        owners, shares: as of a `Layout`.
    """

    whole: frozenset[str] = field(default_factory=frozenset)
    owners: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None


def choose_owners(items: Sequence[Item], ranks: int) -> list[int]:
    """For each item the rank that holds it.

    Args:
        items: in the order of the model.
        ranks: how many there are.
    """
    owners = [0] * len(items)
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    in_unit: dict[tuple[Hashable, int], int] = {}
    for index in sorted(range(len(items)), key=lambda i: (-items[i].cost, -items[i].numel, i)):
        item = items[index]
        least = min(loads)[0]
        # Ranks that have as little to compute differ in what they hold of the unit, and of all.
        chosen = min(
            (in_unit.get((item.unit, rank), 0), numel, rank) for cost, numel, rank in loads if cost <= least * _ALIKE
        )[2]
        cost, numel, _ = loads[chosen]
        loads[chosen] = (cost + item.cost, numel + item.numel, chosen)
        in_unit[item.unit, chosen] = in_unit.get((item.unit, chosen), 0) + item.numel
        owners[index] = chosen
    return owners


_ALIKE: Final = 1 + 1e-9


def spread_small(numels: Sequence[int], held: Sequence[int]) -> list[int]:
    """For each of many small parameters the rank that holds it: the one that holds least so far.

    Args:
        held: elements that each rank holds already.
    """
    heap = [(numel, rank) for rank, numel in enumerate(held)]
    heapify(heap)
    owners = []
    for numel in numels:
        least, rank = heap[0]
        heapreplace(heap, (least + numel, rank))
        owners.append(rank)
    return owners


def fill(held: Sequence[int], cuttable: int) -> tuple[float, ...]:
    """Which part of ``cuttable`` elements each rank takes, so that ranks come as near to one level as they can.

    Args:
        held: elements that each rank holds already.

    Returns:
        Parts whose sum is 1; equal ones where nothing is cuttable.
    """
    if not cuttable:
        return (1 / len(held),) * len(held)
    # The ranks below the level are the first so many of those in order.
    ordered = sorted(held)
    level = total = 0.0
    for count, numel in enumerate(ordered, start=1):
        total += numel
        level = (total + cuttable) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return tuple(max(level - numel, 0.0) / cuttable for numel in held)
