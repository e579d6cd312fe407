"""Buffers (running statistics and the like) are not sharded; this file makes them equal to the first rank's."""

from __future__ import annotations

import torch
from torch import nn

from onecopy.comm.dtensors import is_dtensor, local_of
from onecopy.comm.mesh import Mesh

_TAG = 15


def broadcast_buffers(model: nn.Module, mesh: Mesh, *, all_dtypes: bool = False) -> None:
    """Set the model's buffers to those of the mesh's first rank, one message for each dtype.

    Args:
        all_dtypes: not only floating-point buffers, and plain ones over the tensor axis too; for the set-up.
    """
    if mesh.size * mesh.tensor.size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device, bool], list[torch.Tensor]] = {}
    for buffer in model.buffers():
        if buffer.numel() and not buffer.is_meta and (all_dtypes or buffer.is_floating_point()):
            plain = not is_dtensor(buffer)
            groups.setdefault((buffer.dtype, buffer.device, plain), []).append(local_of(buffer))
    with torch.no_grad():
        for (_, _, plain), buffers in groups.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            for axis in (*mesh.axes, mesh.tensor) if plain and all_dtypes else mesh.axes:
                axis.broadcast(flat, "", _TAG)
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
