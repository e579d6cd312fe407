"""Modules of torch.nn with habits of their own, hooks, and what users keep beside a model, behave as in one process.

The oracle is the whole-batch twin, or the plain model beside the sharded one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD

import onecopy
from models import VOCAB, Stack, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import (
    OPTIMIZERS,
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    train,
    whole_weights,
)
from ranks import every_stage


class Recurrent(nn.Module):
    """LSTM and GRU keep lists of their parameters beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(5, 5, batch_first=True, num_layers=2), nn.GRU(5, 5, batch_first=True)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.view(len(x), 2, 5)
        for block in self.blocks:
            x, _ = block(x)
        return F.mse_loss(self.head(x[:, -1]), y)


class LstmUnits(nn.Module):
    """Each LSTM is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(5, 5, batch_first=True) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.view(len(x), 2, 5)
        for layer in self.layers:
            out, (hidden, _) = layer(x)
            x = x + out + hidden[0][:, None]
        return F.mse_loss(self.head(x[:, -1]), y)


class Encoder(nn.Module):
    """torch.nn's encoder looks at its layers' parameters from outside to choose a fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(10, 2, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.encoder(x[:, None]))[:, 0], y)


class Parametrized(nn.Module):
    """Weights computed from other parameters at each use: weight norm and orthogonal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 10)), nn.Tanh()) for _ in range(2)
        )
        self.turn = parametrizations.orthogonal(nn.Linear(10, 10, bias=False), use_trivialization=False)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(self.turn(x)), y)


@every_stage
@pytest.mark.parametrize("kind", [Recurrent, LstmUnits, Encoder, Parametrized])
@one_fork
def test_module_of_torch_trains_like_twin(kind: type[nn.Module], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(kind), vector_batches(3), stage=stage)

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("kind", [Recurrent, LstmUnits, Encoder])
@one_fork
def test_module_of_torch_evaluates_like_plain(kind: type[nn.Module], stage: int, num_ranks: int) -> Forked:
    """Its fast paths without gradients too, before training and after a step."""

    def run(rank: int) -> None:
        plain, model = seeded(kind), onecopy.shard(seeded(kind), stage)
        batch = vector_batches(1)[0]
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(*batch), plain.eval()(*batch), rtol=1e-6, atol=0)
            train(model.train(), SGD(model.parameters(), lr=0.1), [part(batch, rank, num_ranks)])
            train(plain.train(), SGD(plain.parameters(), lr=0.1), [batch])

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("sparse", [False, True])
@one_fork
def test_embedding_gradients_sparse_or_padded(sparse: bool, stage: int, num_ranks: int) -> Forked:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, 6, sparse=sparse, padding_idx=None if sparse else 3)
            self.head = nn.Linear(6, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(tokens))).square().mean()

    def run(rank: int) -> None:
        twin, model = seeded(Bag), onecopy.shard(seeded(Bag), stage)
        for other, batches in ((twin, token_batches(3)), (model, [part(b, rank, num_ranks) for b in token_batches(3)])):
            optimizer = SGD(other.parameters(), lr=0.5)
            for batch in batches:
                other(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("before", [True, False], ids=["before sharding", "after sharding"])
@one_fork
def test_module_hooks_act_as_on_a_plain_model(before: bool, stage: int, num_ranks: int) -> Forked:
    """Hooks may change inputs and outputs, and full backward hooks gradients. Earlier ones see whole parameters."""

    def add_hooks(model: nn.Module, seen: list[float]) -> nn.Module:
        def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if before:
                seen.append(module[0].weight.sum().item())
            return output * 1.5

        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
            block.register_forward_hook(scale)
            block.register_full_backward_hook(lambda module, gin, gout: tuple(g if g is None else 2 * g for g in gin))
        return model

    def run(rank: int) -> None:
        expected: list[float] = []
        found: list[float] = []
        twin = add_hooks(seeded(Stack), expected)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3))
        if before:
            model = onecopy.shard(add_hooks(seeded(Stack), found), stage)
        else:
            model = add_hooks(onecopy.shard(seeded(Stack), stage), found)
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, num_ranks) for b in vector_batches(3)])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert len(found) == (9 if before else 0)
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_attributes_that_users_set_on_parameters_are_kept(stage: int, num_ranks: int) -> Forked:
    """Groups are often built from them ("no_decay")."""

    def run(rank: int) -> None:
        model = seeded(Stack)
        model.head.bias.no_decay = True
        onecopy.shard(model, stage)
        assert [name for name, p in model.named_parameters() if getattr(p, "no_decay", False)] == ["head.bias"]

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_sharding_and_training_draw_no_random_numbers(stage: int, num_ranks: int) -> Forked:
    """So that dropout and shuffling are those of the same script without onecopy."""

    def run(rank: int) -> None:
        before = torch.get_rng_state()
        model = onecopy.shard(seeded(Stack), stage)
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(vector_batches(1)[0], rank, num_ranks)])
        assert torch.equal(torch.get_rng_state(), before)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_moving_average_of_the_weights_kept_by_hand(stage: int, num_ranks: int) -> Forked:
    """Elementwise, so it stays a slice; put into the model it evaluates like the plain one."""

    def averaged(model: nn.Module, batches: list[Any]) -> list[Tensor]:
        optimizer = SGD(model.parameters(), lr=0.3)
        average = [p.detach().clone() for p in model.parameters()]
        for batch in batches:
            train(model, optimizer, [batch])
            with torch.no_grad():
                torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.25)
        return average

    def run(rank: int) -> None:
        twin, model = seeded(Stack), onecopy.shard(seeded(Stack), stage)
        expected = averaged(twin, vector_batches(4))
        found = averaged(model, [part(batch, rank, num_ranks) for batch in vector_batches(4)])
        assert sum(value.local.numel() for value in found) <= onecopy.padded_numel(model)
        for other, average in ((twin, expected), (model, found)):
            with torch.no_grad():
                for parameter, value in zip(other.parameters(), average, strict=True):
                    parameter.copy_(value)
        assert_same_weights(gathered_weights(model), whole_weights(twin))
        batch = vector_batches(1)[0]
        with torch.no_grad():
            torch.testing.assert_close(model(*batch), twin(*batch), rtol=1e-6, atol=0)

    yield On(num_ranks, run)


class Auxiliary(nn.Module):
    """Blocks that leave a loss of their own behind as an attribute, as mixtures of experts do."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)
            self.gate = nn.Linear(10, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.loss = torch.softmax(self.gate(x), -1).square().mean()
            return x + torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y) + sum(block.loss for block in self.blocks)


@every_stage
@one_fork
def test_losses_left_behind_as_attributes_train_like_twin_or_are_refused(stage: int, num_ranks: int) -> Forked:
    """A unit ends its backward where its returned tensors say so; what is not returned must not be lost in silence."""

    def run(rank: int) -> str:
        model, twin = onecopy.shard(seeded(Auxiliary), stage), seeded(Auxiliary)
        batches = vector_batches(3)
        try:
            train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, num_ranks) for b in batches])
        except UsageError as error:
            return str(error)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), batches)
        assert_same_weights(gathered_weights(model), whole_weights(twin))
        return ""

    for message in (yield On(num_ranks, run)):
        assert message == "" or ("blocks." in message and "eturn" in message), message
