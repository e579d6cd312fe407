"""Parameters that are DTensors over a tensor axis (tensor parallelism): a bucket holds what is local of them.

Tensor parallelism itself is PyTorch's: `parallelize_module` has made parameters DTensors, each cut along one dimension
over the tensor axis or replicated on it. A bucket slices each rank's local tensors over the shard axis like any other;
modules see DTensors again, made around the bucket's views (`TensorSpec.wrap`), and so do those who ask for whole ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.dtensors import dtensor_from, find_segments, is_dtensor, local_of
from onecopy.comm.mesh import Axis
from onecopy.errors import NeedsWholeError, SettingsError


@dataclass(frozen=True)
class TensorSpec:
    """How a DTensor parameter lies over the tensor axis.

    Attributes:
        mesh: the tensor axis, as DTensor knows it.
        placement: a `Shard` or `Replicate` of torch.
        shape: of the whole parameter, as are ``strides``.
        axis: the tensor axis, as onecopy's own collectives know it.
    """

    mesh: DeviceMesh
    placement: Any
    shape: torch.Size
    strides: tuple[int, ...]
    axis: Axis

    @property
    def is_cut(self) -> bool:
        """Whether ranks of the tensor axis hold different elements."""
        return not self.placement.is_replicate()

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Along the dimension that is cut: first index in the whole, and length, of each piece of this rank's part."""
        try:
            return find_segments(self.placement, self.shape[self.placement.dim], self.axis.rank, self.axis.size)
        except ValueError as error:
            raise NeedsWholeError(str(error)) from error

    def wrap(self, local: Tensor) -> Tensor:
        """The DTensor of which ``local`` is this rank's part; they share memory."""
        return dtensor_from(local, self.mesh, (self.placement,), self.shape, self.strides)

    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole shape, which may be a DTensor of any placement or plain.

        A DTensor in another placement is brought to this one, which sends over the tensor axis: the gradient of a
        replicated weight is a sum that is still to be taken where its input was cut along the sequence.

        Raises:
            NeedsWholeError: for a plain tensor, if the placement is not one of the two that say where elements lie.
        """
        if is_dtensor(whole):
            found: Any = whole
            placed = found.placements == (self.placement,)
            return local_of(found if placed else found.redistribute(self.mesh, [self.placement]))
        if not self.is_cut:
            return whole
        if not self.placement.is_shard():
            raise NeedsWholeError(f"a plain tensor cannot be laid out as {self.placement}; pass a DTensor.")
        ((first, length),) = self.segments
        return whole.narrow(self.placement.dim, first, length)


def spec_of(parameter: Tensor, axis: Axis) -> TensorSpec | None:
    """How ``parameter`` lies over the tensor axis; None if it is a plain tensor."""
    if not is_dtensor(parameter):
        return None
    found: Any = parameter
    return TensorSpec(found.device_mesh, found.placements[0], found.shape, found.stride(), axis)


def tensor_mesh(parameters: Iterable[tuple[str, Tensor]]) -> DeviceMesh | None:
    """The one-axis mesh over which the DTensors among named ``parameters`` lie; None if there are none.

    Raises:
        SettingsError: if they lie over more than one axis, or over different ones, or are sums still to be taken.
    """
    first: tuple[str, DeviceMesh] | None = None
    for name, parameter in parameters:
        if not is_dtensor(parameter):
            continue
        found: Any = parameter
        mesh, placements = found.device_mesh, found.placements
        if mesh.ndim != 1 or any(placement.is_partial() for placement in placements):
            raise SettingsError(
                f"parameter {name!r} is a DTensor with {placements} over a mesh of {mesh.ndim} axes; it must be cut "
                "or replicated over one axis, the tensor axis. Leave the data-parallel axes to onecopy.shard(mesh=)."
            )
        if first is not None and first[1] != mesh:
            raise SettingsError(
                f"parameters {first[0]!r} and {name!r} are cut over two different tensor axes: parallelise the whole "
                "model over one mesh axis."
            )
        first = first or (name, mesh)
    return None if first is None else first[1]


def describe(parameter: Tensor) -> str:
    """How it lies over the tensor axis, in words to be compared between ranks; nothing for a plain tensor."""
    found: Any = parameter
    return f", over the tensor axis {found.placements[0]}" if is_dtensor(parameter) else ""
