"""DeviceMeshes whose groups have the default process group's time limit, which torch's own would not give them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def device_mesh(device: str, sizes: Sequence[int], names: Sequence[str], limit: timedelta) -> DeviceMesh:
    """All ranks as a mesh of ``sizes``, whose last axis joins the nearest. A collective call.

    Args:
        device: the type of the device that computes.
        limit: how long a message may take.
    """
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(*sizes)
    # init_device_mesh would give the groups torch's own time limit of half an hour.
    groups = [
        dist.new_subgroups_by_enumeration(ranks.movedim(axis, -1).reshape(-1, size).tolist(), timeout=limit)[0]
        for axis, size in enumerate(sizes)
    ]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(names))
