"""Models of every odd shape train as in one process: branches by data, lists and dicts, odd signatures.

The oracle is plain PyTorch in one process, on the whole batch or on each rank's rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from odd_forwards import (
    InDicts,
    InPlaceAfter,
    InPlaceFirst,
    NoInputGradient,
    OnlyDeepOutput,
    ParameterReturned,
    Recursive,
    Signatures,
    WritesToArguments,
)
from one_fork import Forked, On, one_fork
from oracle import (
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    whole_weights,
)
from ranks import every_stage, everywhere


class Branching(nn.Module):
    """Each rank's data chooses its block; the last block is visited by none but rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 10)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor, route: list[int]) -> Tensor:
        x = torch.tanh(self.entry(x))
        for expert in route:
            x = x + self.experts[expert](x)
        return F.mse_loss(self.head(x), y)


def _train_branches(rank: int, num_ranks: int, stage: int, routes: list[list[list[int]]], accumulate: int) -> None:
    """Ranks take ``routes[micro-batch][rank]``; the twin averages what each of them computes, as DDP defines it."""
    batches = vector_batches(len(routes))
    twin = seeded(Branching)
    twin_optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    model = onecopy.shard(seeded(Branching), stage, accumulate=accumulate)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, (batch, route) in enumerate(zip(batches, routes, strict=True), start=1):
        for other in range(num_ranks):
            (twin(*part(batch, other, num_ranks), route[other % len(route)]) / num_ranks).backward()
        model(*part(batch, rank, num_ranks), route[rank % len(route)]).backward()
        if index % accumulate:
            continue
        unused = {n for n, p in twin.named_parameters() if p.grad is None}
        assert {n for n, p in model.named_parameters() if p.grad is None} == unused
        for o in (twin_optimizer, optimizer):
            o.step()
            o.zero_grad()
    assert_same_weights(gathered_weights(model), whole_weights(twin))


@every_stage
@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.parametrize(
    "routes",
    [
        pytest.param([[[0], [1]]] * 3, id="rank 0 visits A, rank 1 visits B"),
        pytest.param([[[0, 1], [1, 0]]] * 3, id="the same units in another order"),
        pytest.param([[[0, 1, 2], []], [[], [3]], [[2], [2]]], id="changing from step to step"),
        pytest.param([[[0, 1, 2, 3], [0, 1, 2, 3]], [[3], [0]], [[1, 2], [2]]], id="fewer than in the first step"),
        pytest.param([[[0], [0]], [[3, 2], [1]], [[0, 3], [1, 2]]], id="more than in the first step"),
        pytest.param([[[0, 1]], [[0, 0, 2]], [[2, 0, 2, 1]]], id="some twice on every rank"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_units_that_only_some_ranks_data_visits_train_like_twin(
    routes: list[list[list[int]]], accumulate: int, stage: int, num_ranks: int, transport: str
) -> Forked:
    yield On(
        num_ranks,
        lambda rank: _train_branches(rank, num_ranks, stage, routes * accumulate, accumulate),
        transport=transport,
    )


@everywhere
@pytest.mark.parametrize(
    "kind",
    [
        InDicts,
        Signatures,
        WritesToArguments,
        OnlyDeepOutput,
        InPlaceFirst,
        InPlaceAfter,
        Recursive,
        NoInputGradient,
        ParameterReturned,
    ],
)
@one_fork
def test_structure_trains_like_twin(kind: type[nn.Module], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(kind), vector_batches(4), stage=stage)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [2, 3])
@one_fork
def test_units_that_return_nothing_train_like_twin_while_an_exception_is_handled(stage: int) -> Forked:
    """As after a retry: it must not be taken for their own, or units were released as after a failed forward."""

    def run(rank: int) -> None:
        try:
            raise ValueError("an earlier failure")
        except ValueError:
            assert_trains_like_twin(rank, 2, lambda: seeded(WritesToArguments), vector_batches(3), stage=stage)

    yield On(2, run)


class Cached(nn.Module):
    """Keeps its hidden states in a list of its caller's, as generation does, and takes its batch in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, batch: dict[str, Tensor], past: list[Tensor]) -> Tensor:
        past.append(self.linear(batch["x"]) + sum(past))
        return past[-1]


@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_arguments_are_the_callers_again_after_a_forward_in_another_dtype(stage: int) -> Forked:
    """They hold the caller's own tensors, of the caller's dtype, and what the model has added. Oracle: bf16 weights."""

    def run(rank: int) -> None:
        plain = seeded(Cached).to(torch.bfloat16)
        model = onecopy.shard(seeded(Cached), stage, precision="bf16")
        x, first = vector_batches(1)[0][0], torch.ones(12, 10, requires_grad=True)
        batch, past, expected = {"x": x}, [first], [first.bfloat16()]
        for _ in range(2):
            torch.testing.assert_close(model(batch, past), plain({"x": x.bfloat16()}, expected), rtol=1e-2, atol=1e-2)
        assert batch["x"] is x
        assert past[0] is first
        assert len(past) == 3

    yield On(2, run)


@everywhere
@pytest.mark.parametrize(
    "units",
    [
        pytest.param([], id="the root alone"),
        pytest.param([nn.Linear], id="a class"),
        pytest.param(["blocks.0", "head"], id="names"),
        pytest.param(["blocks.1", "blocks.1.0", nn.Tanh], id="a unit in a unit, and one without parameters"),
    ],
)
@one_fork
def test_chosen_units_train_like_twin(units: list[Any], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(Stack), vector_batches(3), stage=stage, units=units)

    yield On(num_ranks, run)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@one_fork
def test_prefetch_changes_no_number(prefetch: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank, 2, lambda: seeded(TinyGPT), token_batches(3), stage=3, prefetch=prefetch, units=[nn.Linear]
        )

    yield On(2, run)
