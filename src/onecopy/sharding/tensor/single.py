"""One SlicedTensor made whole by itself: a gradient, a state, an average. `whole.py` gathers parameters by bucket.

Slices of one parameter have lengths of their own on every rank, 0 among them; what travels is padded to the longest.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from onecopy.comm.mesh import Axis, Mesh
from onecopy.errors import UsageError
from onecopy.sharding.tensor.sliced import SlicedTensor

# Of the first bucket of a process, none of whose own messages has it.
_TAG: Final = 15

_PIECE: Final = 1 << 20
"""Elements that are sent at once to all ranks from one that is not the first."""


def gather_slices(tensor: SlicedTensor) -> Tensor:
    """The whole of ``tensor``, a plain tensor of its shape, strides and dtype; every rank must call it.

    One that belongs to a parameter that tensor parallelism has made a DTensor is a DTensor again. Traffic: (N-1)/N of
    it where all slices are of one length, else up to N-1 times the longest.

    Raises:
        UsageError: if it is a gradient that has not been reduced yet.
    """
    slicing = tensor.slicing
    # An operation, so that one which stands for a gradient without values raises.
    copied: Any = tensor.detach().clone()
    own: Tensor = copied.local
    axis = slicing.axis
    sizes = list(slicing.shape)
    if slicing.spec is not None and slicing.spec.is_cut:
        sizes[slicing.spec.placement.dim] = sum(length for _, length in slicing.spec.segments)
    # Elements lie in memory order, whatever the order of dimensions.
    order = slicing.memory_order
    whole = _concatenate(own, axis).view([sizes[dim] for dim in order])
    whole = whole.permute([order.index(dim) for dim in range(len(order))])
    return whole if slicing.spec is None else slicing.spec.wrap(whole)


SlicedTensor.make_whole = staticmethod(gather_slices)


def _concatenate(own: Tensor, axis: Axis) -> Tensor:
    numels = torch.zeros(axis.size, dtype=torch.int64, device=own.device)
    numels[axis.rank] = own.numel()
    if collective := axis.combine(numels, "norm"):
        collective.finish()
    longest = int(numels.max())
    if longest == 0:
        return own
    mine = own.new_zeros(longest)
    mine[: own.numel()] = own
    padded = own.new_empty(longest * axis.size)
    if collective := axis.all_gather(mine, padded, "", _TAG):
        collective.finish()
    parts = padded.split(longest)
    return torch.cat([part[:numel] for part, numel in zip(parts, numels.tolist(), strict=True)])


def spread_from(source: int | None, flat: Tensor, mesh: Mesh) -> None:
    """Replace the 1-D ``flat`` by that of the rank ``source`` (global; None: the first), on all data-parallel ranks.

    Traffic: all of it, N-1 times, from the source and in zeros from the others.

    Raises:
        UsageError: if ``source`` is none of these ranks.
    """
    own = next((axis.ranks[axis.rank] for axis in mesh.axes if axis.size > 1), 0)
    held = source == own if source is not None else all(axis.rank == 0 for axis in mesh.axes)
    for axis in mesh.axes:
        holders = torch.zeros(axis.size, dtype=torch.int64, device=axis.control_device)
        holders[axis.rank] = int(held)
        if collective := axis.combine(holders, "agree"):
            collective.finish()
        if not holders.any():
            continue
        for piece in flat.split(_PIECE):
            sent = piece.clone() if held else torch.zeros_like(piece)
            if collective := axis.combine(sent, "norm"):
                collective.finish()
            piece.copy_(sent)
        held = True
    if not held:
        raise UsageError(
            f"source={source} is not a rank that holds this model: give the global number of one of its ranks"
        )
