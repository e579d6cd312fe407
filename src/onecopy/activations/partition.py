"""Partition: an activation that all tensor ranks hold alike is kept in parts, one on each (ZeRO §6.1, P_a).

    forward    x, alike on M ranks  ──▶  rank r keeps the r-th of M equal parts of its elements
    backward   parts  ──all-gather──▶  x again, just before its unit recomputes

The all-gather sends (M - 1)/M of x: s·h elements for each block and sample, beside tensor parallelism's own 12·s·h.

Tensor parallelism leaves a block's input alike on all ranks; sequence parallelism cuts it already. A DTensor says
which. Of a plain tensor nobody knows, so ranks compare a sample of it, once for each input of each region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from onecopy.activations.kept import Kept, Store
from onecopy.comm.dtensors import dtensor_from, is_dtensor, local_of
from onecopy.comm.mesh import Axis
from onecopy.memory.arena import Arena
from onecopy.memory.strides import memory_order

_SAMPLE: Final = 128

_ROUNDING: Final = 8
"""Units of the last place by which an element may differ between ranks that compute it alike."""


@dataclass(frozen=True)
class Saved:
    """An activation that is kept.

    Attributes:
        kept: all of its elements, or this rank's part of them.
        like: a tensor without memory of its shape, strides and dtype; of what is local, where it is a DTensor.
        is_cut: whether ``kept`` is a part.
        placed: what makes the local tensor a DTensor again: mesh, placements, shape and strides; None if it was none.
    """

    kept: Kept
    like: Tensor
    is_cut: bool
    placed: tuple[Any, ...] | None


class Partition:
    """Keeps activations in a store, cut over an axis where its ranks hold them alike.

    Args:
        axis: the tensor axis; one of size 1 cuts nothing.
        unit: the name under which gathers are booked.
        arena: where what stays on the device is kept, apart from what lives shorter; None takes it from PyTorch.
    """

    def __init__(self, axis: Axis, store: Store, unit: str, arena: Arena | None = None) -> None:
        self._axis = axis
        self._store = store
        self._unit = unit
        self._arena = arena

    def is_alike(self, tensor: Tensor) -> bool:
        """Whether every rank of the axis holds the same values. A small message, unless ``tensor`` is a DTensor."""
        if self._axis.size == 1:
            return False
        if is_dtensor(tensor):
            placed: Any = tensor
            return all(placement.is_replicate() for placement in placed.placements)
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        values = torch.zeros(_SAMPLE + 1, dtype=torch.float64, device=tensor.device)
        values[0] = flat.numel()
        if flat.numel():
            where = torch.linspace(0, flat.numel() - 1, _SAMPLE, device=tensor.device).long()
            # A NaN is larger than nothing, so that a maximum over ranks might miss it.
            values[1:] = flat[where].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        extremes = torch.cat([values, -values]).to(self._axis.control_device)
        if message := self._axis.combine(extremes, "agree", maximum=True):
            message.finish()
        highest, lowest = extremes[: len(values)], -extremes[len(values) :]
        # What ranks compute alike may differ by the rounding of their kernels, each element by its own: one large
        # element must not hide that the others differ.
        rounding = _ROUNDING * torch.finfo(tensor.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
        close = (highest == lowest) | ((highest - lowest <= rounding) & rounding.isfinite())
        return bool(close.all() and highest[0] == lowest[0])

    def save(self, tensor: Tensor, *, cut: bool) -> Saved:
        """Keep ``tensor``, in parts if ``cut``."""
        placed: Any = tensor
        spec = None
        if is_dtensor(tensor):
            spec = (placed.device_mesh, placed.placements, placed.shape, placed.stride())
        local = local_of(tensor).detach()
        # Its strides if its elements fill their memory, else contiguous ones: an expanded tensor is kept in full.
        like = torch.empty_like(local, device="meta")
        flat = local.permute(memory_order(like.stride())).reshape(-1)
        if cut:
            numel = -(-flat.numel() // self._axis.size)
            own = flat[self._axis.rank * numel : (self._axis.rank + 1) * numel]
            flat = self._copy(own, numel)
        elif self._arena is not None:
            flat = self._copy(flat, flat.numel())
        return Saved(self._store.keep(flat), like, cut, spec)

    def end_call(self) -> None:
        """The call whose tensors were saved is over: they may be changed."""
        self._store.end_call()

    def _copy(self, values: Tensor, numel: int) -> Tensor:
        """``values`` in memory of their own, of at least ``numel`` elements of which the last may be undefined."""
        if self._arena is None:
            copy = values.new_empty(numel)
        else:
            copy = self._arena.empty("checkpoints", numel, values.dtype, values.device)
        copy[: values.numel()] = values
        return copy

    def restore(self, saved: Saved) -> Tensor:
        """The whole activation; where it was cut, every rank of the axis must call it."""
        flat = saved.kept.fetch()
        if saved.is_cut:
            whole = flat.new_empty(flat.numel() * self._axis.size)
            self._axis.gather_activation(flat, whole, self._unit)
            flat = whole[: saved.like.numel()]
        order = memory_order(saved.like.stride())
        inverse = [order.index(dim) for dim in range(len(order))]
        local = flat.view([saved.like.shape[dim] for dim in order]).permute(inverse)
        return local if saved.placed is None else dtensor_from(local, *saved.placed)
