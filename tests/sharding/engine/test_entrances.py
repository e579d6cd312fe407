"""A model that wraps another is entered through that too: methods that go around its own forward work. As PEFT's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import VOCAB, TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from oracle import OPTIMIZERS, assert_trains_like_twin, part
from ranks import every_stage, run_ranks


class Core(TinyGPT):
    """Its forward gives logits too; it generates by calling itself, which may fail."""

    def __init__(self) -> None:
        super().__init__(length=8)

    def forward(self, tokens: Tensor, loss: bool = True) -> Tensor:
        if tokens.shape[1] > 8:
            raise ValueError("too long")
        return super().forward(tokens) if loss else self.logits(tokens)

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens, loss=False)[:, -1:].argmax(-1)], dim=1)
        return tokens


class Tuner(nn.Module):
    """Calls the forward of what it wraps, and not the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model.forward(*args)


class Wrapper(nn.Module):
    """Its `generate` goes around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Tuner(Core())
        self.dropout = nn.Dropout(0.0)

    def forward(self, *args: Any) -> Tensor:
        return self.base(*args)

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        return self.base.model.generate(tokens, length)


@every_stage
@pytest.mark.parametrize("units", ["auto", []])
@one_fork
def test_generating_around_the_roots_forward_equals_the_plain_model(units: Any, stage: int, num_ranks: int) -> Forked:
    """Before, between and after steps, which train like the twin. Oracle: the plain wrapper with the same weights."""

    def run(rank: int) -> None:
        prompt = torch.arange(4).view(2, 2) % VOCAB
        model = assert_trains_like_twin(
            rank, num_ranks, lambda: seeded(Wrapper), token_batches(3), stage=stage, units=units
        )
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for batch in token_batches(2):
            with onecopy.gathered(model):
                plain = Wrapper()
                plain.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
                assert torch.equal(model.generate(prompt, 4), plain.generate(prompt, 4))
            assert torch.equal(model.generate(prompt, 4), plain.generate(prompt, 4))
            with pytest.raises(ValueError, match="too long"):
                model.generate(prompt, 9)
            mine = part(batch, rank, num_ranks)
            assert torch.equal(model(*mine), plain(*mine))
            model.base(*mine).backward()
            optimizer.step()
            optimizer.zero_grad()

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 3), (2, 2)])
def test_below_stage_3_ranks_generate_as_much_as_they_like(stage: int, num_ranks: int) -> None:
    """Even one alone at stage 0. Oracle: the training that generates nothing."""

    def run(rank: int) -> None:
        found = []
        for generates in (True, False):
            model = onecopy.shard(seeded(Wrapper), stage)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            for batch in token_batches(3):
                model(*part(batch, rank, num_ranks)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if generates and (stage or rank == 1):
                    model.generate(torch.tensor([[3, 1]]), 2 + rank)
            with onecopy.gathered(model):
                found.append([parameter.clone() for parameter in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    run_ranks(num_ranks, run, group_timeout=5)
