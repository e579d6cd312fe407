"""Placing: a model's parameters, bucket by bucket, and which of them lie whole on which rank.

Without whole parameters a bucket is the parameters of one unit that share dtypes and `requires_grad`, cut into equal
slices. With some, what trains comes in two kinds of buckets:

    placed    whole parameters, and small ones beside them: each lies in one rank's slice
    cut       the rest, cut so that ranks come out even (`bucket/owners.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onecopy.comm.dtensors import local_of
from onecopy.comm.mesh import Mesh
from onecopy.errors import SettingsError
from onecopy.sharding.bucket.bucket import FoundParameter
from onecopy.sharding.bucket.owners import (
    Item,
    Placing,
    choose_owners,
    cost_of_newton_schulz,
    fill,
    spread_small,
)
from onecopy.sharding.model.chosen import Whole, find_chosen
from onecopy.sharding.setup.needs import need_of
from onecopy.sharding.tensor.precision import Dtypes, Precision
from onecopy.sharding.tensor.tensor_parallel import spec_of

Scopes = Mapping[str, Sequence[FoundParameter]]


@dataclass(frozen=True)
class Group:
    """What becomes one bucket.

    Attributes:
        unit: name of its scope.
        found: its parameters, in their order in the bucket.
        placing: None: cut into equal slices.
    """

    unit: str
    found: list[FoundParameter]
    dtypes: Dtypes
    trainable: bool
    placing: Placing | None = None

    @property
    def numels(self) -> list[int]:
        """Elements on this rank of the tensor axis."""
        return [local_of(item.parameter).numel() for item in self.found]


def find_whole(
    model: nn.Module, scopes: Scopes, whole: Whole | None, optimizers: Sequence[Optimizer]
) -> dict[str, float]:
    """The parameters that are to lie whole on one rank, by name, and what the update of each costs.

    Args:
        whole: as `shard` takes it.
        optimizers: made already; theirs are those that they need.
    """
    chosen = find_chosen(model, whole)
    costs: dict[int, float] = {}
    for optimizer in optimizers:
        need = need_of(optimizer)
        if need is not None and need.needs_model:
            raise SettingsError(
                f"{type(optimizer).__name__} needs all parameters at once in its step, and each rank holds a part of "
                f"them: take an optimizer that updates each parameter by itself (AdamW, Muon, SOAP)."
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if need is not None):
            assert need is not None
            if id(parameter) in chosen or need.prefers(parameter):
                chosen.add(id(parameter))
                costs[id(parameter)] = need.cost(parameter.shape)
    return {
        item.name: next((costs[i] for i in ids if i in costs), cost_of_newton_schulz(item.parameter.shape))
        for found in scopes.values()
        for item in found
        if (ids := [id(p) for p in (item.parameter, *item.twins)])
        and item.parameter.requires_grad
        and item.parameter.numel()
        and any(i in chosen for i in ids)
    }


def check_can_be_whole(scopes: Scopes, whole: Mapping[str, float], mesh: Mesh) -> None:
    """Raise `SettingsError` where parameters cannot lie whole on one rank."""
    if not whole:
        return
    for item in (item for found in scopes.values() for item in found if item.name in whole):
        spec = spec_of(item.parameter, mesh.tensor)
        if spec is not None and spec.is_cut:
            raise SettingsError(
                f"parameter {item.name!r} is cut over the tensor axis, so no rank holds it whole: leave it out of "
                f"whole= and give it to an optimizer that updates each element by itself (AdamW), or leave tensor "
                f"parallelism away"
            )


def group_parameters(
    scopes: Scopes, precision: Precision, whole: Mapping[str, float], mesh: Mesh, *, companion: int
) -> list[Group]:
    """The model's buckets, unit by unit.

    Args:
        whole: as `find_whole` gives it.
        companion: elements up to which a cuttable parameter lies beside whole ones.
    """
    groups: list[Group] = []
    for unit, found in scopes.items():
        kinds: dict[tuple[Dtypes, bool, torch.device], list[FoundParameter]] = {}
        for item in found:
            trainable = item.parameter.requires_grad
            dtypes = precision.for_parameter(item.parameter.dtype, trainable)
            kinds.setdefault((dtypes, trainable, item.parameter.device), []).append(item)
        groups += [Group(unit, items, dtypes, trainable) for (dtypes, trainable, _), items in kinds.items()]
    return _placed(groups, whole, mesh.shard.size, companion) if whole else groups


def _placed(groups: Sequence[Group], whole: Mapping[str, float], ranks: int, companion: int) -> list[Group]:
    """The same, with whole parameters each on one rank and the others making up for it."""
    halves = [half for group in groups for half in _halves(group, whole, companion)]
    placed = [(group, item) for group, is_placed in halves if is_placed for item in group.found]
    large = [(group, item) for group, item in placed if item.name in whole]
    items = [Item(local_of(item.parameter).numel(), whole[item.name], group.unit) for group, item in large]
    owner_of = {item.name: owner for (_, item), owner in zip(large, choose_owners(items, ranks), strict=True)}
    held = [0] * ranks
    for (_, item), one in zip(large, items, strict=True):
        held[owner_of[item.name]] += one.numel
    small = [item for _, item in placed if item.name not in whole]
    numels = [local_of(item.parameter).numel() for item in small]
    for item, owner, numel in zip(small, spread_small(numels, held), numels, strict=True):
        owner_of[item.name] = owner
        held[owner] += numel
    cuttable = sum(sum(group.numels) for group, is_placed in halves if not is_placed and group.trainable)
    shares = fill(held, cuttable)
    return [_with_places(group, is_placed, whole, owner_of, shares) for group, is_placed in halves]


def _halves(group: Group, whole: Mapping[str, float], companion: int) -> list[tuple[Group, bool]]:
    """A group's parameters that are placed, and those that are cut."""
    if not any(item.name in whole for item in group.found):
        return [(group, False)]
    placed: list[FoundParameter] = []
    cut: list[FoundParameter] = []
    for item, numel in zip(group.found, group.numels, strict=True):
        (placed if item.name in whole or numel <= companion else cut).append(item)
    halves = [(replace(group, found=placed), True)]
    return [*halves, (replace(group, found=cut), False)] if cut else halves


def _with_places(
    group: Group, is_placed: bool, whole: Mapping[str, float], owner_of: Mapping[str, int], shares: tuple[float, ...]
) -> Group:
    if not is_placed:
        return replace(group, placing=Placing(shares=shares)) if group.trainable else group
    found = sorted(group.found, key=lambda item: owner_of[item.name])
    owners = tuple(owner_of[item.name] for item in found)
    return replace(group, found=found, placing=Placing(frozenset(whole) & {i.name for i in found}, owners))
