"""Micro-batches, zero_grad and errors in the middle: what is kept, sent and dropped equals one process.

Each test writes a loop once and runs it on a plain model with the whole batch (the oracle) and on a sharded one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from oracle import Mine, assert_same_weights, gathered_weights, part, whole_weights
from ranks import every_stage
from stack_loops import check, sgd


@every_stage
@pytest.mark.parametrize("way", ["accumulate", "no_sync", "reduce_gradients", "no_sync whole"])
@one_fork
def test_every_way_to_accumulate(way: str, stage: int, num_ranks: int) -> Forked:
    """Three micro-batches a step, three steps; Adam's count of steps must be three as well."""

    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        sharded = hasattr(model, "no_sync")
        for start in range(0, 9, 3):
            for index, batch in enumerate(vector_batches(9)[start : start + 3]):
                quiet = sharded and (way == "no_sync whole" or (way == "no_sync" and index < 2))
                with model.no_sync() if quiet else nullcontext():
                    (model(*mine(batch)) / 3).backward()
            if sharded and way in ("reduce_gradients", "no_sync whole"):
                model.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}

    accumulate = {"accumulate": 3, "reduce_gradients": 5}.get(way, 1)
    yield check(stage, num_ranks, loop, accumulate=accumulate)


@every_stage
@pytest.mark.parametrize("set_to_none", [True, False])
@one_fork
def test_zero_grad_both_ways(set_to_none: bool, stage: int, num_ranks: int) -> Forked:
    """Also on a gradient that was never stepped on, and in the middle of accumulation."""

    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for index, batch in enumerate(vector_batches(8), start=1):
            model(*mine(batch)).backward()
            if index in (1, 4):
                optimizer.zero_grad(set_to_none=set_to_none)
            elif index % 2 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    yield check(stage, num_ranks, loop)


@every_stage
@pytest.mark.parametrize("set_to_none", [True, False])
@one_fork
def test_zero_grad_discards_kept_micro_batches(set_to_none: bool, stage: int, num_ranks: int) -> Forked:
    """A bad micro-batch is thrown away under no_sync; the twin throws it away too."""

    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = sgd(model)
        bad, *good = vector_batches(3)
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            model(*mine(bad)).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            model(*mine(good[0])).backward()
        model(*mine(good[1])).backward()
        optimizer.step()

    yield check(stage, num_ranks, loop)


@every_stage
@one_fork
def test_step_on_zero_gradients_counts_as_in_one_process(stage: int, num_ranks: int) -> Forked:
    """A peer's fault: a hidden step on zero gradients left Adam's count one ahead. A step of the user's own counts."""

    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        batches = vector_batches(3)
        model(*mine(batches[0])).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        for batch in batches:
            optimizer.zero_grad()
            model(*mine(batch)).backward()
            optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}

    yield check(stage, num_ranks, loop)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_step_without_gradients_does_nothing(stage: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
        optimizer.step()
        assert not optimizer.state

    yield check(stage, 2, loop)


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("on purpose")


class Fragile(Stack):
    """Raises in the forward or the backward between its blocks when told to."""

    fails: str = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == 1 and self.fails == "forward":
                raise ArithmeticError("on purpose")
            if index == 1 and self.fails == "backward":
                x = _Broken.apply(x)
        return nn.functional.mse_loss(self.head(x), y)


@every_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_going_on_after_an_error_in_the_middle(where: str, accumulate: int, stage: int, num_ranks: int) -> Forked:
    """Every rank fails alike, drops its gradients and goes on; the twin never sees the bad batches."""

    def run(rank: int) -> None:
        twin, model = seeded(Fragile), onecopy.shard(seeded(Fragile), stage, accumulate=accumulate)
        expected, optimizer = sgd(twin), sgd(model)
        batches = vector_batches(6)
        for start in range(0, 6, accumulate):
            for batch in batches[start : start + accumulate]:
                (twin(*batch) / accumulate).backward()
            expected.step()
            expected.zero_grad()
            model.fails = where
            with pytest.raises(ArithmeticError, match="on purpose"):
                model(*part(batches[0], rank, num_ranks)).backward()
            model.fails = ""
            optimizer.zero_grad()
            for batch in batches[start : start + accumulate]:
                (model(*part(batch, rank, num_ranks)) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", [None, "bf16-lean"])
@one_fork
def test_a_step_is_begun_anew_after_an_error_in_its_last_micro_batch(
    precision: str | None, where: str, stage: int, num_ranks: int
) -> Forked:
    """Every rank clears what the first micro-batch left. Oracles: a model that never saw the error; its meter."""

    def run(rank: int) -> None:
        batches = [part(batch, rank, num_ranks) for batch in vector_batches(4)]
        plain, model = (onecopy.shard(seeded(Fragile), stage, accumulate=2, precision=precision) for _ in range(2))
        optimizers = [sgd(plain), sgd(model)]
        for step in range(2):
            model(*batches[0]).backward()
            model.fails = where
            with pytest.raises(ArithmeticError, match="on purpose"):
                model(*batches[1]).backward()
            model.fails = ""
            optimizers[1].zero_grad()
            if where == "forward":
                # Without it, the micro-batch that failed may be run again.
                model.reduce_gradients()
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                for batch in batches[2 * step : 2 * step + 2]:
                    (trained(*batch) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(gathered_weights(model), gathered_weights(plain), 0)
        expected = onecopy.meter(plain).live
        assert onecopy.meter(model).live == expected
        assert expected["gradients_whole"] == expected["parameters_gathered"] * (stage > 0) == 0

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2])
@one_fork
def test_a_backward_that_keeps_its_graph_adds_to_what_was_kept(stage: int) -> Forked:
    """With create_graph=True autograd puts the sum into new memory. Against one process.

    Such a backward is no micro-batch of its own: a step of two of them has three backwards. In the last two steps the
    user clears gradients between them, by value and by None.
    """

    def run(rank: int) -> None:
        model, twin = onecopy.shard(seeded(Stack), stage, accumulate=2), seeded(Stack)
        for each, mine in ((model, lambda b: part(b, rank, 2)), (twin, lambda b: b)):
            optimizer = SGD(each.parameters(), lr=0.1)
            for step, clears in enumerate((None, None, False, True)):
                for number, batch in enumerate(vector_batches(3)):
                    each(*mine(batch)).backward(create_graph=number == step % 2)
                    if clears is not None and number == 1:
                        optimizer.zero_grad(set_to_none=clears)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(2, run)
