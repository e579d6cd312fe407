"""Whole: what it changes in a plan that some matrices lie whole on one rank each, as Muon needs them.

Traffic stays what it is on average, (N-1)/N of each bucket: a rank sends its own slice to each other one. What a rank
computes and holds is near the mean. The optimizer keeps one state of a whole matrix and two of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from onecopy.sharding.bucket.owners import Item, choose_owners, cost_of_newton_schulz, fill


@dataclass(frozen=True)
class Balance:
    """How whole matrices lie on the ranks.

    Attributes:
        whole: elements of whole matrices, by rank.
        cut: elements of the rest, by rank.
        computes: what the dearest rank's updates of whole matrices cost, in means over ranks.
        holds: what the largest rank holds, in means.
    """

    whole: tuple[int, ...]
    cut: tuple[int, ...]
    computes: float
    holds: float

    def state_bytes(self, rank: int, width: int = 4) -> float:
        """Bytes of the optimizer's states on ``rank``: Muon's momentum, and AdamW's two running means of the rest."""
        return float(width * (self.whole[rank] + 2 * self.cut[rank]))


@lru_cache(maxsize=64)
def balance(shapes: tuple[tuple[int, ...], ...], cuttable: int, ranks: int) -> Balance:
    """Where `onecopy.shard` puts them.

    Args:
        shapes: of the matrices that lie whole, in the order of the model.
        cuttable: elements of all other parameters.
        ranks: N, the shard degree.
    """
    items = [Item(prod(shape), cost_of_newton_schulz(shape)) for shape in shapes]
    costs, whole = [0.0] * ranks, [0] * ranks
    for item, owner in zip(items, choose_owners(items, ranks), strict=True):
        costs[owner] += item.cost
        whole[owner] += item.numel
    cut = [round(share * cuttable) for share in fill(whole, cuttable)]
    held = [a + b for a, b in zip(whole, cut, strict=True)]
    return Balance(tuple(whole), tuple(cut), _in_means(costs), _in_means(held))


def states_of_muon(shapes: Sequence[tuple[int, ...]], parameters: int) -> float:
    """Optimizer states for each of so many parameters, where Muon has the matrices of ``shapes`` and AdamW the rest."""
    return 2.0 - sum(map(prod, shapes)) / max(parameters, 1)


def newton_schulz_operations(shapes: tuple[tuple[int, ...], ...], cuttable: int, ranks: int) -> float:
    """Floating-point operations of Muon's step on the dearest rank."""
    total = sum(cost_of_newton_schulz(shape) for shape in shapes)
    return balance(shapes, cuttable, ranks).computes * total / ranks


def _in_means(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
