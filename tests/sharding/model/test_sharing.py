"""Parameters that several modules use in whatever way: they are one, whole for all users, or refused.

The oracle is the naive twin: one process, plain PyTorch, the whole batch; its memory ties are made by one object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import NeedsWholeError, SettingsError, UsageError
from oracle import OPTIMIZERS, assert_trains_like_twin, part
from ranks import every_stage


class TiedByMemory(TinyGPT):
    """Its head and embedding are two Parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.empty_like(self.tokens.weight))
        self.head.weight.data = self.tokens.weight.data


@every_stage
@pytest.mark.parametrize("meta", [False, True])
@one_fork
def test_two_parameters_over_one_memory_are_tied(meta: bool, stage: int, num_ranks: int) -> Forked:
    def build() -> nn.Module:
        return seeded(TiedByMemory)

    def run(rank: int) -> None:
        if meta:
            with torch.device("meta"):
                model = TiedByMemory()
            onecopy.shard(model, stage)
        else:
            model = assert_trains_like_twin(
                rank, num_ranks, build, token_batches(3), stage=stage, twin=lambda: seeded(TinyGPT)
            )
        assert model.head.weight is model.tokens.weight

    yield On(num_ranks, run)


def _slice_of_another(model: Stack) -> list[str]:
    model.head.weight = nn.Parameter(torch.empty(0))
    model.head.weight.data = model.blocks[0][0].weight.data[:3]
    return ["blocks.0.0.weight", "head.weight"]


def _transposed(model: Stack) -> list[str]:
    model.blocks[0][2].weight.data = model.blocks[0][0].weight.data.t()
    return ["blocks.0.0.weight", "blocks.0.2.weight"]


def _frozen_twin(model: Stack) -> list[str]:
    model.blocks[1][0].weight = nn.Parameter(model.blocks[0][0].weight.data, requires_grad=False)
    return ["blocks.0.0.weight", "blocks.1.0.weight"]


def _buffer(model: Stack) -> list[str]:
    model.register_buffer("shadow", model.head.weight.detach()[1])
    return ["head.weight", "shadow"]


def _columns_that_meet(model: Stack) -> list[str]:
    fused = torch.randn(10, 25)
    model.blocks[0][2].weight.data = fused[:, :20]
    model.blocks[1][2].weight.data = fused[:, 5:]
    return ["blocks.0.2.weight", "blocks.1.2.weight"]


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("change", [_slice_of_another, _transposed, _frozen_twin, _buffer, _columns_that_meet])
@one_fork
def test_parameters_that_share_only_some_memory_are_named(change: Callable[[Stack], list[str]], meta: bool) -> Forked:
    def run(_: int) -> None:
        with torch.device("meta" if meta else "cpu"):
            model = Stack()
            names = change(model)
        before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
        with pytest.raises(SettingsError) as caught:
            onecopy.shard(model, 2)
        assert all(repr(name) in str(caught.value) for name in names)
        assert {name: id(p) for name, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}

    yield On(1, run)


@every_stage
@one_fork
def test_parameters_side_by_side_in_one_memory_train_like_twin(stage: int, num_ranks: int) -> Forked:
    """Parts of one flat tensor, as `vector_to_parameters` leaves them, and columns of one matrix."""

    def build() -> nn.Module:
        model = seeded(Stack)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters())
        both = torch.cat([model.blocks[0][2].weight.data, model.blocks[1][2].weight.data], 1)
        model.blocks[0][2].weight.data, model.blocks[1][2].weight.data = both[:, :20], both[:, 20:]
        return model

    yield On(
        num_ranks, lambda rank: assert_trains_like_twin(rank, num_ranks, build, vector_batches(3), stage=stage) and None
    )


@one_fork
def test_an_optimizer_that_holds_both_of_two_tied_parameters_is_refused() -> Forked:
    def run(_: int) -> None:
        model = TiedByMemory()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with pytest.raises(UsageError, match=r"'tokens.weight' twice"):
            onecopy.shard(model, 2, optimizer=optimizer)

    yield On(1, run)


class InTwoBlocks(nn.Module):
    """One module sits in every block, another in two of them; the second's bias is one block's own too."""

    class Inner(nn.Module):
        def __init__(self, everywhere: nn.Module, sometimes: nn.Module) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.everywhere = everywhere
            self.sometimes = sometimes

        def forward(self, x: Tensor) -> Tensor:
            return x + self.sometimes(torch.tanh(self.everywhere(self.first(x))))

    def __init__(self) -> None:
        super().__init__()
        everywhere, sometimes = nn.Linear(10, 10), nn.Linear(10, 10)
        self.blocks = nn.ModuleList(
            self.Inner(everywhere, sometimes if number != 1 else nn.Linear(10, 10)) for number in range(3)
        )
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


class OneBlockInTwoStages(nn.Module):
    """A whole block is in two stages: a unit of its own still."""

    def __init__(self) -> None:
        super().__init__()
        shared = InTwoBlocks.Inner(nn.Linear(10, 10), nn.Linear(10, 10))
        self.stages = nn.ModuleList(
            nn.Sequential(InTwoBlocks.Inner(nn.Linear(10, 10), nn.Linear(10, 10)), shared) for _ in range(2)
        )
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return F.mse_loss(self.head(x), y)


class CallsASibling(nn.Module):
    """As in diffusion transformers: a block calls an embedding of another, which it holds without registering it."""

    class Inner(nn.Module):
        def __init__(self, sibling: nn.Module | None) -> None:
            super().__init__()
            self.embed = nn.Linear(10, 10)
            self.out = nn.Linear(10, 10)
            self.norm = nn.LayerNorm(10)
            self.sibling = [sibling or self]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(torch.tanh(self.norm(self.embed(x) + self.sibling[0].embed(x))))

    def __init__(self) -> None:
        super().__init__()
        first = self.Inner(None)
        self.blocks = nn.ModuleList([first, *(self.Inner(first) for _ in range(2))])
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


class HoldsAnEmbedding(CallsASibling):
    """Each block holds the first one's embedding."""

    class Inner(CallsASibling.Inner):
        def __init__(self, sibling: Any) -> None:
            super().__init__(sibling)
            self.sibling = [{"embed": sibling.embed}] if sibling else [{"embed": self.embed}]
            self.held = self.sibling[0]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(torch.tanh(self.norm(self.embed(x) + self.held["embed"](x))))


@every_stage
@pytest.mark.parametrize("kind", [InTwoBlocks, OneBlockInTwoStages, HoldsAnEmbedding])
@pytest.mark.parametrize("units", ["auto", [InTwoBlocks.Inner, CallsASibling.Inner, nn.Sequential]])
@one_fork
def test_a_module_in_several_blocks_trains_like_twin(
    kind: type[nn.Module], units: Any, stage: int, num_ranks: int
) -> Forked:
    def present(units: Any) -> Any:
        found = {type(module) for module in kind().modules()}
        return units if units == "auto" else [unit for unit in units if any(issubclass(f, unit) for f in found)]

    def run(rank: int) -> list[str]:
        model = assert_trains_like_twin(
            rank, num_ranks, lambda: seeded(kind), vector_batches(3), stage=stage, units=present(units)
        )
        return [unit.name for unit in model._onecopy_engine.units]

    names = (yield On(num_ranks, run))[0]
    assert ("stages.0.1" if kind is OneBlockInTwoStages else "blocks.0") in names


@every_stage
@one_fork
def test_a_block_that_calls_into_a_sibling_is_told_the_units_to_give(stage: int, num_ranks: int) -> Forked:
    """With those it trains like the twin."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(CallsASibling), stage)
        with pytest.raises(NeedsWholeError, match=r"units=\[") as caught:
            model(*part(vector_batches(1)[0], rank, num_ranks))
        units = eval(str(caught.value).rpartition("units=")[2].rstrip(".)"))
        assert units == ["blocks.0.out", "blocks.0.norm", "blocks.1", "blocks.2"]
        assert_trains_like_twin(
            rank, num_ranks, lambda: seeded(CallsASibling), vector_batches(3), stage=stage, units=units
        )

    yield On(num_ranks, run)
