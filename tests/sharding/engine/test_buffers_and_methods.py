"""Buffers, models built on meta, and methods other than forward behave as in one process.

The oracle is plain PyTorch: a replica for every rank, the same modules initialised whole, the plain method.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from models import seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import NeedsWholeError
from oracle import OPTIMIZERS, assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import every_stage


class Normed(nn.Module):
    """BatchNorm: buffers that every forward changes, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(self.head(x), y)


@every_stage
@pytest.mark.parametrize("broadcast", [False, True])
@one_fork
def test_batch_norm_buffers_are_kept_per_rank_or_the_first_ranks(broadcast: bool, stage: int, num_ranks: int) -> Forked:
    """Oracle: a replica for every rank in one process, their gradients averaged, the first one's buffers copied.

    They are equal after the last step already: what is evaluated and saved is one model.
    """
    batches = vector_batches(3)

    def copy_buffers(models: list[nn.Module]) -> None:
        for buffers in zip(*(model.buffers() for model in models), strict=True):
            for other in buffers[1:]:
                other.copy_(buffers[0])

    def replicas() -> list[nn.Module]:
        models = [seeded(Normed) for _ in range(num_ranks)]
        optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
        for batch in batches:
            if broadcast:
                copy_buffers(models)
            for rank, model in enumerate(models):
                model(*part(batch, rank, num_ranks)).backward()
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if broadcast:
            copy_buffers(models)
        return models

    def run(rank: int) -> None:
        expected = replicas()[rank]
        model = onecopy.shard(seeded(Normed), stage, broadcast_buffers=broadcast)
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(batch, rank, num_ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), whole_weights(expected))
        for (name, found), value in zip(model.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(found, value, msg=lambda text, name=name: f"{name}: {text}")

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("callback", [False, True])
@one_fork
def test_meta_model_draws_the_values_of_one_process(callback: bool, stage: int, num_ranks: int) -> Forked:
    """Oracle: the same modules initialised in the same order from the same seed, whole."""

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3)
        for buffer in module.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def initialise(model: nn.Module) -> None:
        for module in model.modules():
            if callback:
                init(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def run(rank: int) -> None:
        twin = Normed()
        torch.manual_seed(3)
        initialise(twin)
        with torch.device("meta"):
            model = Normed()
        onecopy.shard(model, stage)
        # Only the first rank's draws count, so that ranks need no common seed.
        torch.manual_seed(3 + rank)
        assert onecopy.materialize(model, "cpu", init if callback else None) is model
        assert_same_weights(gathered_weights(model), whole_weights(twin), atol=0)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, num_ranks) for batch in vector_batches(2)])
        moved = gathered_weights(model)
        assert not torch.equal(moved["head.weight"], twin.head.weight)

    yield On(num_ranks, run)


def _outcome(call: Callable[[], Tensor]) -> Tensor | NeedsWholeError:
    try:
        return call()
    except NeedsWholeError as error:
        return error


class Generator(nn.Module):
    """A model with a method other than forward that uses parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.encode(x), y)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def direct(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)


@every_stage
@pytest.mark.parametrize("method", ["encode", "direct"])
@one_fork
def test_a_method_other_than_forward_works_inside_gathered(method: str, stage: int, num_ranks: int) -> Forked:
    """Outside it either works too or raises an error that names the way; never a crash or a wrong number."""
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: getattr(model, method)(x)  # noqa: E731

    def run(rank: int) -> None:
        x = torch.randn(2, 10)
        expected = call(seeded(Generator), x)
        model = onecopy.shard(seeded(Generator), stage)
        with onecopy.gathered(model), torch.no_grad():
            assert torch.equal(call(model, x), expected)
        with torch.no_grad():
            if method == "direct":
                with pytest.raises(NeedsWholeError, match=r"head\..*gathered"):
                    model.direct(x)
            elif isinstance(found := _outcome(lambda: model.encode(x)), NeedsWholeError):
                assert "gathered" in str(found)
            else:
                assert torch.equal(found, expected)
        assert_trains_after(model, rank)

    def assert_trains_after(model: nn.Module, rank: int) -> None:
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(vector_batches(1)[0], rank, num_ranks)])
        twin = seeded(Generator)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(1))
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)
