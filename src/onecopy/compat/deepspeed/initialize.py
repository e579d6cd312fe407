"""initialize: an engine of a model and a config; and how a program that DeepSpeed's launcher started begins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from onecopy.compat.deepspeed.config import Config, read_config
from onecopy.compat.deepspeed.engine import Engine
from onecopy.compat.deepspeed.schedules import make_optimizer, make_schedule
from onecopy.errors import SettingsError
from onecopy.sharding.setup.api import shard


def init_distributed(dist_backend: str | None = None, **kwargs: Any) -> None:
    """Start torch.distributed from the launcher's variables, if it is not started.

    Args:
        dist_backend: None takes nccl where there is an accelerator, and gloo elsewhere.
        kwargs: DeepSpeed's others; those that torch knows (``timeout``, ``rank``, ``world_size``, ``init_method``)
            are passed on.
    """
    if dist.is_initialized():
        return
    known = {name: value for name in ("timeout", "init_method") if (value := kwargs.get(name)) is not None}
    known |= {name: value for name in ("rank", "world_size") if (value := kwargs.get(name, -1)) not in (None, -1)}
    dist.init_process_group(dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"), **known)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a program take ``--deepspeed`` and ``--deepspeed_config FILE``."""
    group = parser.add_argument_group("DeepSpeed", "as DeepSpeed's launcher passes them")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[Engine, Optimizer | None, Any, Any]:
    """Shard a model as a DeepSpeed config says, and put an engine around it. Every rank calls it.

    Args:
        args: ``args.deepspeed_config`` is the config where ``config`` is not given.
        optimizer: one made from the model's parameters, or a function that makes one of them; else the config's.
        model_parameters: what the config's optimizer, or the function, is to hold; None: all that train.
        training_data: for which a loader of this rank's micro-batches is made.
        lr_scheduler: one made for ``optimizer``, or a function that makes one of it; else the config's.
        collate_fn: of that loader.
        mpu, mesh_param: must be None; a tensor-parallel model is one of DTensors here.

    Returns:
        Engine, optimizer, loader, scheduler; None for what there is not.

    Raises:
        SettingsError: for a key that cannot be honoured, and for what is unknown, with the nearest name.
    """
    if model is None:
        raise SettingsError("initialize needs a model: pass model=")
    if mpu is not None or mesh_param is not None:
        raise SettingsError(
            "initialize(mpu=, mesh_param=) is for DeepSpeed's own model parallelism, which onecopy does not have: "
            "leave them out, and cut the model with torch.distributed.tensor.parallel.parallelize_module"
        )
    given = next(
        (one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None), None
    )
    if given is None:
        raise SettingsError("initialize needs a config: pass config=, or args.deepspeed_config")
    if dist_init_required is not False and "RANK" in os.environ:
        init_distributed()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = read_config(given, model, ranks)
    device = _device()
    model.to(device)

    own = _make_optimizer(settings, optimizer, model, model_parameters)
    scheduler_of = _schedule_maker(settings, lr_scheduler)
    mesh = None
    if settings.shard is not None and settings.shard < ranks:
        sizes = (ranks // settings.shard, settings.shard)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    shard(
        model,
        stage=settings.stage,
        mesh=mesh,
        precision=settings.precision,
        accumulate=settings.accumulate,
        prefetch=settings.prefetch,
        offload=settings.offload,
        optimizer=own,
    )
    scheduler = scheduler_of(own) if scheduler_of is not None and own is not None else None
    loader = None
    if training_data is not None:
        sampler: DistributedSampler[Any] | None = DistributedSampler(training_data) if dist.is_initialized() else None
        loader = DataLoader(
            training_data,
            batch_size=settings.micro_batch,
            sampler=sampler,
            shuffle=sampler is None,
            collate_fn=collate_fn,
        )
    return Engine(model, own, scheduler, loader, settings, device), own, loader, scheduler


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(local)
    return torch.device(accelerator.type, local)


def _make_optimizer(
    settings: Config, given: Any, model: nn.Module, parameters: Iterable[Any] | None
) -> Optimizer | None:
    held = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, Optimizer):
        return given
    if callable(given):
        made = given(held)
        assert isinstance(made, Optimizer)
        return made
    return make_optimizer(settings.optimizer, held) if settings.optimizer is not None else None


def _schedule_maker(settings: Config, given: Any) -> Callable[[Optimizer], Any] | None:
    if given is not None:
        return given if callable(given) and not hasattr(given, "step") else lambda optimizer: given
    section = settings.scheduler
    return (lambda optimizer: make_schedule(section, optimizer)) if section is not None else None
