"""Optimizers from PyPI that need whole parameters, or none: each trains to the bits of one process.

Oracle: the package's own optimizer in one process (`train_in_rank_order`). A package that is not there is a skip.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import assert_same_weights, gathered_weights, part, train, train_in_rank_order

STEPS = 10
every_layout = pytest.mark.parametrize("stage, num_ranks", [(1, 2), (2, 3), (3, 4)])
Make = Callable[[nn.Module], Optimizer]


def soap(model: nn.Module) -> Optimizer:
    package: Any = import_module("pytorch_optimizer")
    return package.SOAP(model.parameters(), lr=1e-2, precondition_frequency=3)


def shampoo(model: nn.Module) -> Optimizer:
    package: Any = import_module("pytorch_optimizer")
    return package.Shampoo(model.parameters(), lr=1e-2, preconditioning_compute_steps=3)


def adamw8bit(model: nn.Module) -> Optimizer:
    """As it is written, which computes the same: compiling its update would take a minute."""
    package: Any = import_module("torchao.optim")
    torch.compiler.set_stance("force_eager")
    return package.AdamW8bit(model.parameters(), lr=1e-2)


def schedulefree(model: nn.Module) -> Optimizer:
    package: Any = import_module("schedulefree")
    return package.AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)


MAKES: dict[str, Make] = {"SOAP": soap, "Shampoo": shampoo, "AdamW8bit": adamw8bit}
PACKAGES = {"SOAP": "pytorch_optimizer", "Shampoo": "pytorch_optimizer", "AdamW8bit": "torchao.optim"}


def build() -> nn.Module:
    """Its matrices have 4096 elements and more, which a block-quantised optimizer quantises."""
    return seeded(TinyGPT, dim=48)


@pytest.mark.parametrize("name", MAKES)
@every_layout
@one_fork
def test_trains_to_the_bits_of_one_process(name: str, stage: int, num_ranks: int) -> Forked:
    pytest.importorskip(PACKAGES[name])

    def run(rank: int) -> tuple[set[str], int]:
        batches = token_batches(STEPS)
        model = build()
        optimizer = MAKES[name](model)
        onecopy.shard(model, stage, optimizer=optimizer)
        train(model, optimizer, [part(batch, rank, num_ranks) for batch in batches])
        twin = build()
        stepped = MAKES[name](twin)
        expected = train_in_rank_order(twin, lambda _: stepped, batches, num_ranks).weights
        assert_same_weights(gathered_weights(model), expected, atol=0)
        return {p.slicing.name for p in optimizer.state}, onecopy.meter(model).live["optimizer"]

    found = yield On(num_ranks, run)
    owned = [name for names, _ in found for name in names]
    assert sorted(owned) == sorted(name for name, _ in TinyGPT().named_parameters())
    if name == "AdamW8bit":
        # Two states of a byte for an element, and a scale of 4 for 256; small parameters have two of 4.
        numels = [p.numel() for p in build().parameters()]
        quantised = [n for n in numels if n >= 4096 and n % 256 == 0]
        small = sum(numels) - sum(quantised)
        nbytes = sum(2 * (n + n // 256 * 4 + 256 * 4) for n in quantised) + 8 * small + 4 * len(numels)
        assert sum(total for _, total in found) == nbytes


@every_layout
@one_fork
def test_schedulefree_trains_over_slices(stage: int, num_ranks: int) -> Forked:
    """It updates each element by itself, and moves weights to another place for evaluation."""
    pytest.importorskip("schedulefree")

    def loop(model: nn.Module, optimizer: Any, mine: Callable[[Any], Any], gathered: Callable[..., Any]) -> Any:
        optimizer.train()
        for batch in token_batches(STEPS):
            model(*mine(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        return gathered(model)

    def run(rank: int) -> None:
        twin = build()
        expected = loop(twin, schedulefree(twin), lambda batch: batch, lambda m: dict(m.named_parameters()))
        for whole in (None, lambda name, p: p.ndim == 2):
            model = onecopy.shard(build(), stage, whole=whole)
            optimizer = schedulefree(model)
            found = loop(model, optimizer, lambda batch: part(batch, rank, num_ranks), gathered_weights)
            assert_same_weights(found, expected, atol=1e-4)

    yield On(num_ranks, run)


@pytest.mark.parametrize("name", MAKES)
@one_fork
def test_over_cut_parameters_they_are_refused(name: str) -> Forked:
    pytest.importorskip(PACKAGES[name])

    def run(rank: int) -> None:
        model = onecopy.shard(build(), 3)
        optimizer = MAKES[name](model)
        model(*part(token_batches(1)[0], rank, 2)).backward()
        with pytest.raises(UsageError, match=r"needs 'tokens\.weight'.*whole=lambda name, p: p\.ndim == 2"):
            optimizer.step()

    yield On(2, run)


@one_fork
def test_quantised_states_are_no_part_of_a_checkpoint(tmp_path: Any) -> Forked:
    """Said in words, on every rank; the model is saved without them, and each rank's own file keeps them."""
    pytest.importorskip("torchao.optim")

    def run(rank: int) -> Tensor | None:
        model = build()
        optimizer = adamw8bit(model)
        onecopy.shard(model, 3, optimizer=optimizer)
        train(model, optimizer, [part(batch, rank, 2) for batch in token_batches(1)])
        with pytest.raises(UsageError, match=r"OptimState8bit, which a checkpoint does not hold.*torch\.save"):
            onecopy.save(tmp_path, model, optimizer)
        onecopy.save(tmp_path, model).wait()
        return None

    yield On(2, run)
