"""Optimizers stay torch's: every elementwise one trains like the twin, and one that needs whole matrices says so.

The oracle is the same optimizer on the whole-batch twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import OnecopyError
from oracle import (
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    mean_over_ranks,
    part,
    train,
    whole_weights,
)
from ranks import every_stage, run_ranks

ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD maximize": lambda p: SGD(p, lr=0.01, maximize=True),
    "Adam": lambda p: Adam(p, lr=1e-2),
    "Adam amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "Adam fused": lambda p: Adam(p, lr=1e-2, fused=True, amsgrad=True, weight_decay=0.1),
    "Adam foreach": lambda p: Adam(p, lr=1e-2, foreach=True),
    "Adam tensor lr": lambda p: Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=1e-1, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@one_fork
def test_elementwise_optimizer_trains_like_twin(name: str) -> Forked:
    """Every stage, on three ranks; 1e-5 where a state divides by a small running mean."""

    def run(rank: int) -> None:
        for stage in (0, 1, 2, 3):
            assert_trains_like_twin(
                rank,
                3,
                lambda: seeded(Stack),
                vector_batches(4),
                stage=stage,
                optimizer=ELEMENTWISE[name],
                rtol=1e-5,
                atol=1e-5,
            )

    yield On(3, run)


WHOLE_MATRICES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Muon": lambda p: optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adafactor foreach": lambda p: optim.Adafactor(p, lr=1e-2, foreach=True),
    "LBFGS": lambda p: optim.LBFGS(p),
    # Elementwise by nature, but it writes through boolean indices, which have other lengths on every rank.
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
}


@pytest.mark.parametrize("name", WHOLE_MATRICES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@one_fork
def test_optimizer_that_needs_whole_matrices_is_refused(name: str, stage: int) -> Forked:
    """At its construction or first step, by name of a parameter; never a silent step on slices."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        before = gathered_weights(model)
        batch = part(vector_batches(1)[0], rank, 2)

        def closure() -> torch.Tensor:
            loss = model(*batch)
            loss.backward()
            return loss

        def step() -> None:
            WHOLE_MATRICES[name](list(model.parameters())).step(closure)

        with pytest.raises(OnecopyError, match=r"(blocks|head)\S*(weight|bias)"):
            step()
        assert_same_weights(gathered_weights(model), before, atol=0)

    yield On(2, run)


@every_stage
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "with state"])
@pytest.mark.parametrize("make", ["AdamW", "Adam fused", "SGD nesterov"])
@one_fork
def test_optimizer_made_before_sharding_is_remapped(make: str, stepped: bool, stage: int, num_ranks: int) -> Forked:
    """It is the same object afterwards, its groups too: two steps before sharding and two after it make four."""

    def run(rank: int) -> None:
        model, twin = seeded(Stack), seeded(Stack)
        optimizer, expected = ELEMENTWISE[make](model.parameters()), ELEMENTWISE[make](twin.parameters())
        batches = vector_batches(4)
        if stepped:
            train(model, optimizer, batches[:2])
        train(twin, expected, batches if stepped else batches[2:])
        groups = optimizer.param_groups
        onecopy.shard(model, stage, optimizer=optimizer)
        assert optimizer.param_groups is groups
        assert all(a is b for a, b in zip(groups[0]["params"], model.parameters(), strict=True))
        train(model, optimizer, [part(batch, rank, num_ranks) for batch in batches[2:]])
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_schedulers_link_to_a_remapped_optimizer_holds(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model, twin = seeded(Stack), seeded(Stack)
        pairs = []
        for other in (model, twin):
            optimizer = SGD(other.parameters(), lr=0.1, momentum=0.9)
            pairs.append((optimizer, optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
        onecopy.shard(model, stage, optimizer=pairs[0][0])
        for batch in vector_batches(3):
            train(model, pairs[0][0], [part(batch, rank, num_ranks)])
            train(twin, pairs[1][0], [batch])
            for _, scheduler in pairs:
                scheduler.step()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_two_optimizers_on_one_model(stage: int) -> Forked:
    """One for the head, one for the rest, stepped after the same backward."""

    def run(rank: int) -> None:
        model, twin = onecopy.shard(seeded(Stack), stage), seeded(Stack)
        for other, batches in ((model, [part(b, rank, 2) for b in vector_batches(3)]), (twin, vector_batches(3))):
            optimizers = [AdamW(other.head.parameters(), lr=1e-2), SGD(other.blocks.parameters(), lr=0.1)]
            for batch in batches:
                other(*batch).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(2, run)


@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_two_models_in_one_loop(stage: int) -> Forked:
    """A generator and a critic, sharded apart: their engines must not take each other's messages."""

    def run(rank: int) -> None:
        sharded = [onecopy.shard(seeded(Stack, layers=n), stage) for n in (2, 3)]
        twins = [seeded(Stack, layers=n) for n in (2, 3)]
        for models, mine in ((sharded, lambda b: part(b, rank, 2)), (twins, lambda b: b)):
            first, second = models
            optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
            for batch in vector_batches(3):
                (first(*mine(batch)) + 0.5 * second(*mine(batch))).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                second(*mine(batch)).backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
        for model, twin in zip(sharded, twins, strict=True):
            assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(2, run)


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.parametrize("stages", [(1, 3), (3, 2), (3, 3), (0, 3)])
@one_fork
def test_two_models_interleaved(stages: tuple[int, int], transport: str) -> Forked:
    """One feeds the other, which is evaluated and stepped while the first one's backward is still to come."""

    def layers(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 10))

    def run(rank: int) -> None:
        twins = [seeded(lambda width=width: layers(width)) for width in (12, 17)]
        sharded = [
            onecopy.shard(seeded(lambda width=width: layers(width)), stage, units=[nn.Linear])
            for width, stage in zip((12, 17), stages, strict=True)
        ]
        losses = []
        for models, mine in ((sharded, lambda b: part(b, rank, 2)), (twins, lambda b: b)):
            first, second = models
            optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
            seen = []
            for batch in vector_batches(3):
                x, _ = mine(batch)
                made = first(x)
                with torch.no_grad():
                    seen.append(float(second(made).square().mean()))
                second(made.detach()).square().mean().backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
                again = first(x * 2)
                (second(made).square().mean() + second(again).abs().mean()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(seen)
        for model, twin in zip(sharded, twins, strict=True):
            assert_same_weights(gathered_weights(model), whole_weights(twin))
        assert mean_over_ranks(losses[0]) == pytest.approx(losses[1], rel=1e-5)

    yield On(2, run, transport=transport)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_optimizer_over_several_models(stage: int) -> None:
    """Ranks settle the models' messages in one order, though their objects lie at different addresses."""

    def run(rank: int) -> None:
        others: list[Any] = []
        sharded = []
        for n in range(1, 6):
            others.append([object() for _ in range(997 * n * rank)])
            sharded.append(onecopy.shard(seeded(Stack, layers=n), stage))
        twins = [seeded(Stack, layers=n) for n in range(1, 6)]
        for models, mine in ((sharded, lambda b: part(b, rank, 2)), (twins, lambda b: b)):
            parameters = [p for m in models for p in m.parameters()]
            optimizer = SGD(parameters, lr=0.1)
            for batch in vector_batches(3):
                torch.stack([model(*mine(batch)) for model in models]).sum().backward()
                clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        for model, twin in zip(sharded, twins, strict=True):
            assert_same_weights(gathered_weights(model), whole_weights(twin))
        whole = [p for twin in twins for p in twin.parameters()]
        with onecopy.gathered([p for model in sharded for p in model.parameters()]) as found:
            for one, other in zip(found, whole, strict=True):
                torch.testing.assert_close(one, other)

    run_ranks(2, run, group_timeout=8.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_step_with_a_closure(stage: int) -> Forked:
    def run(rank: int) -> None:
        model, twin = onecopy.shard(seeded(Stack), stage), seeded(Stack)
        for other, batches in ((model, [part(b, rank, 2) for b in vector_batches(3)]), (twin, vector_batches(3))):
            optimizer = SGD(other.parameters(), lr=0.1)
            for batch in batches:

                def closure(other: nn.Module = other, batch: Any = batch, made: Optimizer = optimizer) -> torch.Tensor:
                    made.zero_grad()
                    loss = other(*batch)
                    loss.backward()
                    return loss  # type: ignore[no-any-return]

                optimizer.step(closure)
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(2, run)
