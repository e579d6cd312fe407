"""Systems: onecopy's stages and its peers, each set up for the same model, and how each takes a step.

All use AdamW with its defaults, fused. fully_shard is told its units (`model.blocks`), which onecopy finds by itself.
DeepSpeed gets buckets of DDP's size and neither clipping nor parameters that stay whole; it runs where its package is
installed, and so does FairScale. One more is no peer but what all of them have to compute (`floor.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import onecopy
from harness.floor import adamw_on_share
from trained.cases import DTYPES, Batch

BUCKET_BYTES: Final = 25 * 2**20
"""DDP's default."""


@dataclass(frozen=True)
class Settings:
    """What a system is told beside the model."""

    precision: str
    micro_batches: int


@dataclass(frozen=True)
class Step:
    """What a step gave: the mean loss of its micro-batches, and the seconds of the optimizer's part."""

    loss: float
    optimizer: float


@dataclass(frozen=True)
class Trainer:
    """Takes optimizer steps, each on a list of micro-batches. ``sharded`` is the model if onecopy runs it."""

    step: Callable[[list[Batch]], Step]
    sharded: nn.Module | None = None


@dataclass(frozen=True)
class System:
    """Something that trains.

    Attributes:
        stage: whose memory and traffic it promises.
        package: what must be installed.
        ours: whether it is onecopy.
        floor: whether it only computes what every system has to. It is then no peer: its losses agree with nobody's,
            it has no memory or traffic to compare, and its times are kept apart (`contest.Contest.floor`).
    """

    stage: int
    set_up: Callable[[nn.Module, Settings], Trainer]
    package: str = "torch"
    ours: bool = False
    floor: bool = False

    @property
    def obstacle(self) -> str | None:
        """Why it cannot run here, None if nothing is known to be in its way."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return _unbuilt() if self.package == "deepspeed" else None


def _unbuilt() -> str | None:
    """Whether DeepSpeed would wait forever for, or fail to build, the extension that it loads on a CPU."""
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    locks = list(cache.glob("**/deepspeed_shm_comm/lock"))
    if locks:
        return f"its extension is being built, or a build was killed: if so, remove {locks[0]}"
    if not any(cache.glob("**/deepspeed_shm_comm/*.so")) and shutil.which("g++") is None:
        return "its extension is not built, and g++ was not found"
    return None


def _onecopy(stage: int) -> System:
    def set_up(model: nn.Module, settings: Settings) -> Trainer:
        onecopy.shard(model, stage, precision=settings.precision, accumulate=settings.micro_batches)
        return Trainer(_loop(model, _adamw(model.parameters())), sharded=model)

    return System(stage, set_up, ours=True)


def _data_parallel(model: nn.Module, settings: Settings) -> DistributedDataParallel:
    # Buffers are not broadcast before each forward, as they are not by the others.
    model = model.to(DTYPES[settings.precision])
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def _ddp(model: nn.Module, settings: Settings) -> Trainer:
    wrapped = _data_parallel(model, settings)
    return Trainer(_loop(wrapped, _adamw(wrapped.parameters())))


def _zero_redundancy(model: nn.Module, settings: Settings) -> Trainer:
    wrapped = _data_parallel(model, settings)
    trainable = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    return Trainer(_loop(wrapped, ZeroRedundancyOptimizer(trainable, torch.optim.AdamW, fused=True)))


def _fully_shard(stage: int, reshard: bool) -> System:
    def set_up(model: nn.Module, settings: Settings) -> Trainer:
        dtype = DTYPES[settings.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for module in (*_blocks(model), model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
        return Trainer(_loop(model, _adamw(model.parameters())))

    return System(stage, set_up)


FAIR: Final = {
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "reduce_bucket_size": BUCKET_BYTES // 4,
        "allgather_bucket_size": BUCKET_BYTES // 4,
        "stage3_prefetch_bucket_size": BUCKET_BYTES // 4,
        "stage3_param_persistence_threshold": 0,
    },
}
"""DeepSpeed's settings for a comparison; the sizes count elements."""


def deepspeed(stage: int, config: dict[str, Any]) -> System:
    """DeepSpeed with ``config`` on top of what a run needs at all."""

    def set_up(model: nn.Module, settings: Settings) -> Trainer:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": settings.micro_batches,
                "bf16": {"enabled": settings.precision == "bf16"},
                "zero_allow_untested_optimizer": True,
                **config,
                "zero_optimization": {"stage": stage, **config.get("zero_optimization", {})},
            },
        )

        def step(batches: list[Batch]) -> Step:
            total = 0.0
            for batch in batches:
                loss = engine(*batch)
                engine.backward(loss)
                total += loss.item()
                start = perf_counter()
                # Only the last of these updates parameters.
                engine.step()
            return Step(total / len(batches), perf_counter() - start)

        return Trainer(step)

    return System(stage, set_up, "deepspeed")


def _fairscale(model: nn.Module, settings: Settings) -> Trainer:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = model.to(DTYPES[settings.precision])
    optimizer = OSS([p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, fused=True)
    wrapped = ShardedDataParallel(model, optimizer, sync_models_at_startup=True, broadcast_buffers=False)
    # Its buckets are the memory of p.grad: let go, as torch's zero_grad does by default, later steps come out wrong.
    return Trainer(_loop(wrapped, optimizer, set_to_none=False))


def _no_communication(model: nn.Module, settings: Settings) -> Trainer:
    model = model.to(DTYPES[settings.precision])
    return Trainer(_loop(model, adamw_on_share(model.parameters(), dist.get_rank(), dist.get_world_size())))


FLOOR: Final = "no communication"
"""What the floor is called among the systems."""

SYSTEMS: Final = {
    "DDP": System(0, _ddp),
    **{f"onecopy stage {stage}": _onecopy(stage) for stage in range(4)},
    "DDP + ZeroRedundancyOptimizer": System(1, _zero_redundancy),
    "fully_shard, reshard_after_forward=False": _fully_shard(2, reshard=False),
    "fully_shard, reshard_after_forward=True": _fully_shard(3, reshard=True),
    **{f"DeepSpeed stage {stage}": deepspeed(stage, FAIR) for stage in (1, 2, 3)},
    "FairScale ShardedDataParallel": System(2, _fairscale, "fairscale"),
    FLOOR: System(1, _no_communication, floor=True),
}


def _blocks(model: Any) -> Iterable[nn.Module]:
    blocks: Iterable[nn.Module] = model.blocks
    return blocks


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], fused=True)


def _loop(model: Any, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> Callable[[list[Batch]], Step]:
    """The plain training loop, with DDP's way to accumulate where the model has it."""
    pause = getattr(model, "no_sync", nullcontext)

    def step(batches: list[Batch]) -> Step:
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            with pause() if number < len(batches) else nullcontext():
                loss = model(*batch) / len(batches)
                loss.backward()
            total += loss.item()
        start = perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        return Step(total, perf_counter() - start)

    return step
