"""Whole parameters: the user's own optimizer, unchanged, equal to one process to the last bit.

Oracle: `train_in_rank_order`, plain PyTorch in one process, which adds what each rank would compute in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import AdamW, Optimizer

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from oracle import assert_same_weights, gathered_weights, part, train, train_in_rank_order

STEPS = 10
ROWS = 12
"""What 2, 3 and 4 divide."""

every_layout = pytest.mark.parametrize("stage, num_ranks", [(1, 2), (2, 3), (3, 4), (3, 2)])


class Both(Optimizer):
    """Several optimizers as one, for a loop that knows one. It holds no parameters itself."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """The hidden layers' matrices, which Muon's documentation asks for; the embeddings are AdamW's."""
    return parameter.ndim == 2 and "blocks" in name


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
    return [optim.Muon(matrices, lr=0.02), AdamW(others, lr=1e-2, weight_decay=0.1)]


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2): a ratio of two norms of each parameter scales its step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                ratio = p.norm() / update.norm()
                p.add_(update * ratio, alpha=-group["lr"])


Make = Callable[[nn.Module], list[Optimizer]]

OPTIMIZERS: dict[str, Make] = {
    "Muon and AdamW": muon_and_adamw,
    "Adafactor": lambda model: [optim.Adafactor(model.parameters(), lr=1e-2)],
    "Rprop": lambda model: [optim.Rprop(model.parameters(), lr=1e-3)],
}


def train_alone(make: Make, num_ranks: int, batches: Sequence[Any], **settings: Any) -> dict[str, Tensor]:
    model = seeded(TinyGPT)
    together = Both(*make(model))
    return train_in_rank_order(model, lambda _: together, batches, num_ranks, **settings).weights


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_layout
@one_fork
def test_trains_to_the_bits_of_one_process(name: str, stage: int, num_ranks: int) -> Forked:
    """Given the optimizers, `shard` lays whole what they need."""

    def run(rank: int) -> None:
        batches = token_batches(STEPS, rows=ROWS)
        model = seeded(TinyGPT)
        optimizers = OPTIMIZERS[name](model)
        onecopy.shard(model, stage, optimizer=optimizers)
        train(model, Both(*optimizers), [part(batch, rank, num_ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), train_alone(OPTIMIZERS[name], num_ranks, batches), atol=0)

    yield On(num_ranks, run)
