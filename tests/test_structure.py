"""Models of every odd shape train as in one process: branches by data, lists and dicts, odd signatures.

The oracle is plain PyTorch in one process, on the whole batch or on each rank's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from models import Chain, Stack, TinyGPT, seeded, token_batches, vector_batches
from oracle import (
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    whole_weights,
)
from ranks import every_stage, everywhere, run_ranks


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
def test_units_that_only_some_ranks_data_visits_train_like_twin(
    routes: list[list[list[int]]], accumulate: int, stage: int, num_ranks: int, transport: str
) -> None:
    run_ranks(
        num_ranks,
        lambda rank: _train_branches(rank, num_ranks, stage, routes * accumulate, accumulate),
        transport=transport,
    )


class InDicts(nn.Module):
    """Modules and parameters in every container that torch has, one list inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 10)})
        self.nested = nn.ModuleList(nn.ModuleList(nn.Linear(10, 10) for _ in range(2)) for _ in range(2))
        self.values = nn.ParameterList([torch.randn(10), torch.randn(10)])
        self.by_name = nn.ParameterDict({"shift": torch.randn(10)})
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.named["b"](self.named["a"](x)))
        for layers in self.nested:
            for layer in layers:
                x = x + torch.tanh(layer(x))
        return F.mse_loss(self.head(x * self.values[0] + self.values[1] - self.by_name["shift"]), y)


@dataclass
class Hidden:
    """What a block returns: tensors in a dataclass, a dict, a tuple and a list."""

    state: Tensor
    extras: dict[str, Any]


class Signatures(nn.Module):
    """Blocks with keyword arguments, defaults and nested outputs."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, *, hidden: Hidden, scale: float = 2.0, flag: bool | None = None) -> Hidden:
            assert flag is None
            out = torch.tanh(self.linear(hidden.state) * scale)
            return Hidden(hidden.state + out, {"all": (out, [out * 2, {"deep": out * 3}]), "name": "inner"})

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = Hidden(x, {})
        loss = x.new_zeros(())
        for layer in self.layers:
            hidden = layer(hidden=hidden, scale=1.5)
            first, (second, third) = hidden.extras["all"]
            loss = loss + 0.1 * (first.square().mean() + second.mean() - third["deep"].mean())
        return loss + F.mse_loss(self.head(hidden.state), y)


class WritesToArguments(nn.Module):
    """Blocks return nothing: they write to a list, a dict and a dataclass that they were given."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, seen: list[Tensor], named: dict[str, Tensor], hidden: Hidden) -> None:
            seen.append(torch.tanh(self.linear(seen[-1])))
            named["sum"] = named["sum"] + seen[-1]
            hidden.state = hidden.state * seen[-1]
            hidden.extras.setdefault("all", []).append(self.linear(hidden.state))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.entry = nn.Linear(10, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        seen, named, hidden = [x], {"x": x, "sum": x}, Hidden(x, {})
        for layer in self.layers:
            layer(seen, named, hidden=hidden)
        assert len(seen) == len(hidden.extras["all"]) + 1 == 4
        assert seen[0] is named["x"] is x
        return F.mse_loss(self.head(torch.stack(seen).sum(0) + named["sum"] + hidden.state), y)


class OnlyDeepOutput(nn.Module):
    """The loss reaches a block through nothing but the deepest tensor of its nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Signatures.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden=Hidden(x, {})).extras["all"][1][1]["deep"]
        return F.mse_loss(self.head(x), y)


class InPlaceFirst(Chain):
    """Blocks whose first operation writes to their input."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(10, 10)))


class InPlaceAfter(nn.Module):
    """What a block returned is written to by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5).add_(x)
        return F.mse_loss(self.head(x), y)


class Recursive(nn.Module):
    """A block that calls itself."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = torch.tanh(self.linear(x))
            return x + self(x, depth - 1) if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 2)
        return F.mse_loss(self.head(x), y)


class NoInputGradient(nn.Module):
    """Blocks whose inputs need no gradient, two of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.mse_loss(tower(x), y) for tower in self.towers)


class ParameterReturned(nn.Module):
    """A block returns its parameter, and the model uses another's weight directly."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 10) / 3)

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x @ block())
        return F.mse_loss(self.head(x), y)


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
def test_structure_trains_like_twin(kind: type[nn.Module], stage: int, num_ranks: int) -> None:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(kind), vector_batches(4), stage=stage)

    run_ranks(num_ranks, run)


@pytest.mark.parametrize("stage", [2, 3])
def test_units_that_return_nothing_train_like_twin_while_an_exception_is_handled(stage: int) -> None:
    """As after a retry: it must not be taken for their own, or units were released as after a failed forward."""

    def run(rank: int) -> None:
        try:
            raise ValueError("an earlier failure")
        except ValueError:
            assert_trains_like_twin(rank, 2, lambda: seeded(WritesToArguments), vector_batches(3), stage=stage)

    run_ranks(2, run)


class Cached(nn.Module):
    """Keeps its hidden states in a list of its caller's, as generation does, and takes its batch in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, batch: dict[str, Tensor], past: list[Tensor]) -> Tensor:
        past.append(self.linear(batch["x"]) + sum(past))
        return past[-1]


@pytest.mark.parametrize("stage", [0, 3])
def test_arguments_are_the_callers_again_after_a_forward_in_another_dtype(stage: int) -> None:
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

    run_ranks(2, run)


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
def test_chosen_units_train_like_twin(units: list[Any], stage: int, num_ranks: int) -> None:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(Stack), vector_batches(3), stage=stage, units=units)

    run_ranks(num_ranks, run)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_prefetch_changes_no_number(prefetch: int) -> None:
    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank, 2, lambda: seeded(TinyGPT), token_batches(3), stage=3, prefetch=prefetch, units=[nn.Linear]
        )

    run_ranks(2, run)
