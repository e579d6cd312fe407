"""resilient: the call that makes a `Run`, and what it refuses before any work starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from onecopy.errors import SettingsError
from onecopy.resilience.membership import membership
from onecopy.resilience.run import Run
from onecopy.resilience.slices import check_optimizer
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.setup.api import engine_of


def resilient(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    checkpoints: str | Path | None = None,
    save_every: int = 0,
    keep: int = 2,
    **kept: Any,
) -> Run:
    """A run that survives the loss of ranks: a lost rank's states come back from its peers' memory.

    That needs a second rank to hold every slice, `onecopy.shard(..., mirror=True)` or ``copies=2``, and somebody who
    starts another process in the place of one that has ended, `onecopy run`. Else, and where all holders of a slice are
    lost, ranks are started again, and the run goes on from the newest whole checkpoint.

    Args:
        model: that `onecopy.shard` returned.
        optimizer: of its parameters; updates each element by itself, as AdamW and SGD do.
        scheduler, scaler: are given back to newcomers, and put back where a step is done over.
        checkpoints: a directory; where no peer holds anything, the run goes on from the newest one in there.
        save_every: steps between checkpoints that the loop saves there by itself; 0: none.
        keep: how many of these stay.
        kept: other objects that change from step to step and are alike on all ranks, under names of your choice: with
            `state_dict()` and `load_state_dict()`, or dicts.

    Returns:
        The `Run`: its `loop` gives the batches, and its `step` takes the place of the optimizer's.

    Raises:
        SettingsError: for what cannot be brought back.
    """
    engine = engine_of(model)
    if engine.mesh.tensor.size > 1:
        raise SettingsError("onecopy.resilient cannot bring back ranks of a tensor-parallel model yet")
    if engine.lays_whole:
        raise SettingsError(
            "onecopy.resilient cannot bring back parameters that lie whole in one rank's slice yet: shard without "
            "whole= and without optimizers that need whole matrices (Muon)"
        )
    if engine.stores is not None and engine.stores.optimizer is not None:
        raise SettingsError(
            "onecopy.resilient cannot bring back slices that rest in files yet: shard without offload= to a directory"
        )
    _check_mesh(engine)
    if save_every and checkpoints is None:
        raise SettingsError("save_every= needs checkpoints=, a directory")
    check_optimizer(engine, optimizer)
    return Run(
        model,
        optimizer,
        scaler=scaler,
        kept={"scheduler": scheduler, **kept},
        checkpoints=None if checkpoints is None else Path(checkpoints),
        save_every=save_every,
        keep=keep,
    )


def _check_mesh(engine: Engine) -> None:
    """Raise `SettingsError` if the mesh cannot be made anew from its sizes and names."""
    if engine.mesh_shape is None or membership() is None:
        return
    member = membership()
    may_shrink = member is not None and member.now is not None and member.now.fewest < member.now.wanted
    if may_shrink and engine.mesh.copies > 1 and engine.stage.shards_optimizer:
        raise SettingsError(
            "onecopy run --min-ranks goes on with one rank less, among which each slice cannot have several holders: "
            "shard with mirror=True in place of copies=, or leave --min-ranks out"
        )
    _, sizes, names = engine.mesh_shape
    ranks = torch.arange(dist.get_world_size()).view(-1)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    axes = {name: axis for axis, name in enumerate(names)}
    own = engine.mesh.shard
    axis = axes.get("shard")
    in_order = len(names) == len(sizes) and math.prod(sizes) == len(ranks) and axis is not None
    if in_order and own.size > 1:
        first = dist.get_rank() - own.rank * strides[axis or 0]
        in_order = own.ranks == tuple(first + place * strides[axis or 0] for place in range(own.size))
    if not in_order:
        raise SettingsError(
            f"onecopy.resilient makes the mesh anew after a loss, and can do so for all ranks in order and axes named "
            f'"shard" and "replicate"; found sizes {sizes}, names {names}. Pass onecopy.shard(copies=...) instead.'
        )
