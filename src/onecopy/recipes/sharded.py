"""Sharded: a model spread over the ranks as the config says, for training and for the tuner's probes."""

from __future__ import annotations

from datetime import timedelta

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import onecopy
from onecopy.comm.device_meshes import device_mesh
from onecopy.recipes.checks import offload_of
from onecopy.recipes.config import Config
from onecopy.recipes.tensor_parallel import parallelize
from onecopy.recipes.world import World
from onecopy.sharding.model.chosen import hidden_matrices
from onecopy.sharding.model.discover import Units


def shard_as(config: Config, world: World, model: nn.Module) -> nn.Module:
    """Move the model to this rank's device, cut its blocks over tensor ranks, shard its states. Every rank calls it.

    Args:
        config: one that `checks.resolve` returned.
        model: on the CPU.
    """
    parallel = config.parallel
    model, mesh = model.to(world.device), mesh_for(config, world)
    if mesh is not None and parallel.tensor > 1:
        parallelize(model, mesh["tensor"], sequence=parallel.sequence)
    return onecopy.shard(
        model,
        parallel.stage,
        mesh=mesh,
        units=units_of(parallel.units),
        precision=parallel.precision,
        accumulate=parallel.accumulate,
        prefetch=parallel.prefetch,
        activations=_activations(config),
        bucket_bytes=parallel.bucket_bytes or None,
        defragment=parallel.defragment,
        offload=offload_of(config),
        mirror=config.recovery.mirror,
        whole=hidden_matrices(model) if config.optimizer.optimizer == "muon" else None,
    )


def units_of(text: str) -> Units:
    """What ``parallel.units`` says, as `onecopy.shard` takes it: "auto", "one", or names of classes and modules."""
    if text == "auto":
        return "auto"
    return [] if text == "one" else [name.strip() for name in text.split(",")]


def mesh_for(config: Config, world: World) -> DeviceMesh | None:
    """Nearest neighbours share a model (tensor parallelism), the next a copy of its states (hybrid sharding)."""
    parallel = config.parallel
    if parallel.replicate == parallel.tensor == 1:
        return None
    sizes = (parallel.replicate, world.size // parallel.replicate // parallel.tensor, parallel.tensor)
    names = ("replicate", "shard", "tensor")
    return device_mesh(world.device.type, sizes, names, timedelta(seconds=parallel.timeout))


def _activations(config: Config) -> onecopy.Activations | None:
    chosen = config.activations
    if not chosen.recompute:
        return None
    return onecopy.Activations(
        "selective" if chosen.recompute == "selective" else "units",
        partition=chosen.partition and not config.parallel.sequence,
        offload=None if chosen.keep_on == "device" else chosen.keep_on,
    )
