"""Training on a device, emulated or not, held against one process on the CPU: equal values, and nothing reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from models import TinyGPT, seeded, token_batches
from on_device import Seen, reports_of, run_on_device
from oracle import OPTIMIZERS, Batch, MakeOptimizer, assert_same_weights, part, train, train_twin

STEPS = 3


def tiny() -> nn.Module:
    """Three blocks, of which the middle one is gathered ahead and followed by another."""
    return seeded(TinyGPT, layers=3)


def on(device: torch.device, build: Callable[[], nn.Module]) -> nn.Module:
    """The model made on the device: `.to()` makes new parameters for a device of this kind, and so unties them."""
    with device:
        return build()


def parts_of(batches: Sequence[Batch], rank: int, num_ranks: int, device: torch.device) -> list[Batch]:
    return [tuple(tensor.to(device) for tensor in part(batch, rank, num_ranks)) for batch in batches]


def mean_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters of a sharded model, on the CPU. Every rank must call it."""
    with onecopy.gathered(model):
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def trains_like_one_process(
    rank: int,
    device: torch.device,
    num_ranks: int,
    *,
    stage: int,
    build: Callable[[], nn.Module] = tiny,
    sharded: Callable[[], nn.Module] | None = None,
    optimizer: MakeOptimizer = OPTIMIZERS["sgd"],
    accumulate: int = 1,
    clip: float | None = 0.5,
    half: torch.dtype | None = None,
    rows: int = 12,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    **settings: Any,
) -> nn.Module:
    """Train on this rank's rows on the device, and on all rows in plain PyTorch on the CPU; the two must agree.

    Args:
        build: makes the model.
        sharded: makes the one that is sharded, where that is another.
        rows: of a global batch.
        half: the dtype in which the plain model computes.
        settings: of `onecopy.shard`.

    Returns:
        The sharded model.
    """
    batches = token_batches(STEPS * accumulate, rows=rows)
    expected = train_twin(build(), optimizer, batches, accumulate=accumulate, clip=clip, half=half)
    model = onecopy.shard(on(device, sharded or build), stage, accumulate=accumulate, **settings)
    run = train(
        model,
        optimizer(model.parameters()),
        parts_of(batches, rank, num_ranks, device),
        accumulate=accumulate,
        clip=clip,
    )
    assert mean_over_ranks(run.losses, device) == pytest.approx(expected.losses, rel=rtol)
    assert run.norms == pytest.approx(expected.norms, rel=rtol)
    assert_same_weights(weights_of(model), expected.weights, atol)
    return model


def run_clean(num_ranks: int, function: Callable[[int, torch.device], Any], **kwargs: Any) -> list[Seen]:
    """As `run_on_device`; nothing may be reported."""
    seen = run_on_device(num_ranks, function, **kwargs)
    assert reports_of(seen) == []
    return seen
