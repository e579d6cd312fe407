"""The naive twin: one process, plain PyTorch, the whole batch. What a sharded run must equal.

Nothing in this file knows onecopy, apart from the last section, which holds sharded runs against the twin.
`train` is the ordinary training loop; twin, peers and sharded models all go through it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

import onecopy

Batch = tuple[Tensor, ...]
Mine = Callable[[Batch], Batch]
Loop = Callable[[nn.Module, Mine], Sequence[float] | None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw-fused": lambda parameters: AdamW(parameters, lr=1e-3, fused=True),
    "adamw-loop": lambda parameters: AdamW(parameters, lr=1e-3, foreach=False),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}


@dataclass
class Run:
    """What a training run leaves behind.

    Attributes:
        losses: of every micro-batch.
        norms: of the gradient at every step, before clipping.
        weights: whole parameters at the end, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def part(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """The rows of a global batch that ``rank`` trains on; no two ranks see the same data."""
    assert all(len(tensor) % num_ranks == 0 for tensor in batch), "unequal parts have unequal means"
    return tuple(tensor.chunk(num_ranks)[rank] for tensor in batch)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    clip: float | None = None,
) -> Run:
    """The training loop as a user writes it; every ``accumulate`` batches make a step."""
    run = Run()
    for index, batch in enumerate(batches, start=1):
        loss = model(*batch)
        (loss / accumulate).backward()
        run.losses.append(loss.item())
        if index % accumulate == 0:
            if clip is None:
                norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            else:
                norm = clip_grad_norm_(model.parameters(), clip)
            run.norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    return run


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of a model that holds them whole."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class HalfTwin(nn.Module):
    """``model`` computed with half-width copies of its fp32 parameters, as mixed precision is defined.

    Autograd takes the gradient through the cast, so it is computed in half width and accumulated in fp32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, *batch: Tensor) -> Any:
        narrow = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return functional_call(
            self.model, narrow, tuple(t.to(self.dtype) if t.is_floating_point() else t for t in batch)
        )


def train_twin(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    half: torch.dtype | None = None,
) -> Run:
    """Train ``model`` on whole batches in this process."""
    computing = model if half is None else HalfTwin(model, half)
    run = train(computing, make_optimizer(model.parameters()), batches, accumulate=accumulate, clip=clip)
    run.weights = whole_weights(model)
    return run


def train_in_rank_order(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Batch],
    num_ranks: int,
    *,
    accumulate: int = 1,
    half: torch.dtype | None = None,
    sum_first: bool = False,
    hold: torch.dtype | None = None,
    clip: float | None = None,
) -> Run:
    """Train ``model`` in this process on what each rank would compute, summed in rank order: equal to the last bit.

    Args:
        sum_first: add micro-batches on each rank before the sum over ranks (stages 0 and 1), else after it.
        hold: dtype in which gradients are held: sums of micro-batches, means over ranks and what clipping leaves are
            rounded to it.
    """
    run = Run()
    optimizer = make_optimizer(model.parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    computing = model if half is None else HalfTwin(model, half)
    for start in range(0, len(batches), accumulate):
        local = [
            [
                _gradients(computing, part(batch, rank, num_ranks), parameters, accumulate, run)
                for rank in range(num_ranks)
            ]
            for batch in batches[start : start + accumulate]
        ]
        if sum_first:
            kept = hold if accumulate > 1 else None
            local = [[_sum([micro[rank] for micro in local], kept) for rank in range(num_ranks)]]
        for ranks in local:
            for parameter, *terms in zip(parameters, *ranks, strict=True):
                mean = _round(_sum([[t] for t in terms])[0].mul_(1.0 / num_ranks), hold)
                parameter.grad = mean if parameter.grad is None else _round(parameter.grad.add_(mean), hold)
        if clip is not None:
            run.norms.append(clip_grad_norm_(parameters, clip).item())
            for parameter in parameters:
                _round(parameter.grad, hold)
        optimizer.step()
        optimizer.zero_grad()
    run.weights = whole_weights(model)
    return run


def _gradients(
    model: nn.Module, batch: Batch, parameters: list[nn.Parameter], accumulate: int, run: Run
) -> list[Tensor]:
    loss = model(*batch)
    run.losses.append(loss.item())
    return list(torch.autograd.grad(loss / accumulate, parameters))


def _sum(terms: list[list[Tensor]], hold: torch.dtype | None = None) -> list[Tensor]:
    """Element by element, first to last; terms and sums are rounded to ``hold``."""
    total = [_round(t.clone(), hold) for t in terms[0]]
    for term in terms[1:]:
        for to, value in zip(total, term, strict=True):
            _round(to.add_(value if hold is None else value.to(hold)), hold)
    return total


def _round(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """To what ``dtype`` can hold, in place."""
    assert tensor is not None
    return tensor if dtype is None else tensor.copy_(tensor.to(dtype))


# --- holding a sharded run against the twin


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters of a sharded model. Every rank must call it."""
    with onecopy.gathered(model):
        return whole_weights(model)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """The mean over ranks of each value."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.tolist()


def assert_same_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6, rtol: float = 0
) -> None:
    """Same names, shapes, dtypes and, to ``atol`` and ``rtol``, values."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_trains_like_twin(
    rank: int,
    num_ranks: int,
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    stage: int,
    optimizer: MakeOptimizer = OPTIMIZERS["sgd"],
    accumulate: int = 1,
    clip: float | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    twin: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> nn.Module:
    """Train a sharded model on this rank's rows and its twin on all of them; losses, norms and weights must agree.

    Args:
        build: makes the model, the same on every call.
        twin: makes the twin where that is not ``build``.
        settings: of `onecopy.shard`.

    Returns:
        The sharded model.
    """
    expected = train_twin((twin or build)(), optimizer, batches, accumulate=accumulate, clip=clip)
    model = onecopy.shard(build(), stage, accumulate=accumulate, **settings)
    parts = [part(batch, rank, num_ranks) for batch in batches]
    run = train(model, optimizer(model.parameters()), parts, accumulate=accumulate, clip=clip)
    assert mean_over_ranks(run.losses) == pytest.approx(expected.losses, rel=rtol, abs=0)
    assert run.norms == pytest.approx(expected.norms, rel=rtol, abs=0)
    assert_same_weights(gathered_weights(model), expected.weights, atol)
    return model


def assert_loop_like_twin(
    rank: int,
    num_ranks: int,
    loop: Loop,
    build: Callable[[], nn.Module],
    *,
    stage: int,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    **settings: Any,
) -> nn.Module:
    """Run a training loop of the test's own on the whole-batch twin and on a sharded model.

    Args:
        loop: called with a model and with the function that cuts this process's rows out of a global batch (the twin's
            returns all of them). What it returns must be equal as means over ranks.
        build: makes the model, the same on every call.
        settings: of `onecopy.shard`.

    Returns:
        The sharded model.
    """
    twin = build()
    expected = loop(twin, lambda batch: batch)
    model = onecopy.shard(build(), stage, **settings)
    found = loop(model, lambda batch: part(batch, rank, num_ranks))
    if expected is not None and found is not None:
        assert mean_over_ranks(found) == pytest.approx(list(expected), rel=rtol, abs=0)
    assert_same_weights(gathered_weights(model), whole_weights(twin), atol)
    return model
