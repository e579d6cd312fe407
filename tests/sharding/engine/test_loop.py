"""The training loop stays PyTorch's own: whatever a user writes around forward and backward gives the twin's numbers.

Each test writes a loop once and runs it on a plain model with the whole batch (the oracle) and on a sharded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import AdamW, Optimizer, lr_scheduler

import onecopy
from models import TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from oracle import (
    OPTIMIZERS,
    Mine,
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    train,
    whole_weights,
)
from ranks import every_stage
from stack_loops import check, sgd, stack

# --- clipping


@every_stage
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
@one_fork
def test_clip_grad_norm_of_any_order(norm_type: float, foreach: bool | None, stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, norms = sgd(model), []
        for batch in vector_batches(2):
            model(*mine(batch)).backward()
            norm = clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type, foreach=foreach)
            assert norm > 0.05
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    yield check(stage, num_ranks, loop)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_clip_grad_value(stage: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        model(*mine(vector_batches(1)[0])).backward()
        clip_grad_value_(model.parameters(), 0.01)
        sgd(model).step()

    yield check(stage, 2, loop)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_error_if_nonfinite_is_raised_on_every_rank(stage: int) -> Forked:
    """Only rank 1's data is bad."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        x, y = part(vector_batches(1)[0], rank, 2)
        model(x * (float("inf") if rank else 1), y).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    yield On(2, run)


# --- forwards and backwards in other numbers than one each


@every_stage
@one_fork
def test_several_forwards_before_one_backward(stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = sgd(model)
        for a, b, c in zip(*[iter(vector_batches(6))] * 3, strict=True):
            loss = model(*mine(a)) + 0.5 * model(*mine(b)) - 0.1 * model(*mine(c))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    yield check(stage, num_ranks, loop)


@every_stage
@one_fork
def test_two_forwards_then_two_backwards(stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = sgd(model)
        for a, b in zip(*[iter(vector_batches(4))] * 2, strict=True):
            first, second = model(*mine(a)), model(*mine(b))
            first.backward()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()

    yield check(stage, num_ranks, loop)


@every_stage
@one_fork
def test_two_backwards_through_one_graph(stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        loss = model(*mine(vector_batches(1)[0]))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        sgd(model).step()

    yield check(stage, num_ranks, loop)


@every_stage
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("first", [False, True], ids=["between forward and backward", "before the first step"])
@one_fork
def test_evaluation_in_the_middle_of_training(mode: Any, first: bool, stage: int, num_ranks: int) -> Forked:
    """It must see the latest weights, and leave training as it was."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, values = sgd(model), []
        held_out, *batches = vector_batches(4)

        def evaluate() -> None:
            model.eval()
            with mode():
                values.append(model(*mine(held_out)).item())
            model.train()

        if first:
            evaluate()
        for batch in batches:
            loss = model(*mine(batch))
            if not first:
                evaluate()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate()
        return values

    yield check(stage, num_ranks, loop)


@every_stage
@one_fork
def test_gradients_of_inputs(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        x, y = vector_batches(1)[0]
        whole = x.clone().requires_grad_()
        stack()(whole, y).backward()
        assert whole.grad is not None
        own_x, own_y = part((x, y), rank, num_ranks)
        own = own_x.clone().requires_grad_()
        onecopy.shard(stack(), stage)(own, own_y).backward()
        torch.testing.assert_close(own.grad, part((whole.grad,), rank, num_ranks)[0] * num_ranks)

    yield On(num_ranks, run)


# --- parameter groups and schedulers


def _groups_by_ndim(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _groups_by_name(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    head = [p for n, p in named.items() if n.startswith("head.")]
    return [
        {"params": head, "lr": 0.1, "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if n.endswith("bias") and not n.startswith("head.")]},
        {"params": [p for n, p in named.items() if n.endswith("weight") and not n.startswith("head.")], "lr": 1e-3},
    ]


@every_stage
@pytest.mark.parametrize("groups", [_groups_by_ndim, _groups_by_name], ids=["by ndim", "by name"])
@one_fork
def test_parameter_groups(groups: Callable[[nn.Module], list[dict[str, Any]]], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        # The optimizer sees parameters alone, so the groups are built by looking at the model from outside.
        twin, model = stack(), onecopy.shard(stack(), stage)
        for other, mine in ((twin, lambda b: b), (model, lambda b: part(b, rank, num_ranks))):
            train(other, AdamW(groups(other), lr=1e-2), [mine(batch) for batch in vector_batches(3)])
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    ],
    ids=["cosine", "lambda", "one cycle", "sequential"],
)
@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_learning_rate_schedulers(schedule: Callable[[Optimizer], Any], stage: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, rates = sgd(model), []
        scheduler = schedule(optimizer)
        for batch in vector_batches(5):
            model(*mine(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates

    yield check(stage, 2, loop)


# --- when the optimizer is made


@every_stage
@pytest.mark.parametrize("when", ["before the first forward", "after the first forward", "after the first backward"])
@one_fork
def test_it_does_not_matter_when_the_optimizer_is_made(when: str, stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2) if when == "before the first forward" else None
        for batch in vector_batches(3):
            loss = model(*mine(batch))
            if optimizer is None and when == "after the first forward":
                optimizer = AdamW(model.parameters(), lr=1e-2)
            loss.backward()
            optimizer = optimizer or AdamW(model.parameters(), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()

    yield check(stage, num_ranks, loop)


@every_stage
@one_fork
def test_parameters_seen_before_a_forward_are_those_after_it(stage: int, num_ranks: int) -> Forked:
    """The optimizer holds them: they must be the same objects, at every moment outside of computation."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        before: Iterable[Any] = list(model.parameters())
        loss = model(*part(vector_batches(1)[0], rank, num_ranks))
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        loss.backward()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    yield On(num_ranks, run)


@one_fork
def test_fused_adamw_trains_a_language_model_of_many_units() -> Forked:
    def run(rank: int) -> None:
        build = lambda: seeded(TinyGPT, layers=6)  # noqa: E731
        assert_trains_like_twin(
            rank, 3, build, token_batches(4), stage=3, optimizer=OPTIMIZERS["adamw-fused"], clip=1.0
        )

    yield On(3, run)
