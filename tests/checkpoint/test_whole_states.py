"""Checkpoints of whole parameters: each owner's states by name, for any number of ranks and any layout.

Oracle: a run that was not interrupted, which the oracle of tests/sharding/setup holds to one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import AdamW, Optimizer

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import CheckpointError
from oracle import assert_same_weights, gathered_weights, part, whole_weights


class Lists(Optimizer):
    """As SOAP and Shampoo: lists of square matrices among a parameter's states, with gaps, and numbers beside."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"GG": [torch.zeros(n, n) if n < 30 else [] for n in p.shape], "Q": None, "number": 0}
                state["number"] += 1
                for dim, gram in enumerate(state["GG"]):
                    if len(gram):
                        flat = p.grad.movedim(dim, 0).flatten(1)
                        gram.lerp_(flat @ flat.T, 0.5)
                scale = 1 + sum(float(gram.trace()) for gram in state["GG"] if len(gram)) + state["number"]
                p.add_(p.grad, alpha=-group["lr"] / scale)


onecopy.needs_whole(Lists)

Make = Callable[[nn.Module], list[Optimizer]]


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def with_adamw(kind: Callable[[Any], Optimizer]) -> Make:
    def make(model: nn.Module) -> list[Optimizer]:
        matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
        return [kind(matrices), AdamW(others, lr=1e-2)]

    return make


MAKES: dict[str, Make] = {
    "Muon": with_adamw(lambda matrices: optim.Muon(matrices, lr=0.02)),
    "Adafactor": lambda model: [optim.Adafactor(model.parameters(), lr=1e-2)],
    "lists": with_adamw(Lists),
    "AdamW": lambda model: [AdamW(model.parameters(), lr=1e-2)],
}
WHOLE: dict[str, Any] = {
    "Muon": is_matrix,
    "Adafactor": lambda name, p: True,
    "lists": is_matrix,
    "AdamW": is_matrix,
}


def steps(model: nn.Module, optimizers: Sequence[Optimizer], rank: int, ranks: int, some: slice) -> None:
    for batch in token_batches(4)[some]:
        model(*part(batch, rank, ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", MAKES)
@one_fork
def test_goes_on_at_any_number_of_ranks(name: str, tmp_path: Path) -> Forked:
    """Two ranks save; three load, and one process that knows nothing of slices. Each then has what was saved."""
    directory = tmp_path / name

    def save(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=WHOLE[name])
        optimizers = MAKES[name](model)
        steps(model, optimizers, rank, 2, slice(2))
        onecopy.save(directory, model, optimizers).wait()
        saved = gathered_weights(model)
        steps(model, optimizers, rank, 2, slice(2, 4))
        return saved, gathered_weights(model)

    saved, later = (yield On(2, save))[0]

    def load(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(TinyGPT), 2, whole=WHOLE[name])
        optimizers = MAKES[name](model)
        onecopy.load(directory, model, optimizers)
        assert_same_weights(gathered_weights(model), saved, atol=0)
        for optimizer in [one for one in optimizers if not isinstance(one, AdamW)]:
            assert all(parameter.slicing.is_owned for parameter in optimizer.state)
        steps(model, optimizers, rank, 3, slice(2, 4))
        return gathered_weights(model)

    def alone(rank: int) -> dict[str, Tensor]:
        model = seeded(TinyGPT)
        optimizers = MAKES[name](model)
        onecopy.load(directory, model, optimizers)
        steps(model, optimizers, 0, 1, slice(2, 4))
        return whole_weights(model)

    # Newton-Schulz computes in bf16, which turns the last bit of a gradient into the third digit of an update.
    close = 2e-3 if name == "Muon" else 1e-4
    assert_same_weights((yield On(3, load))[0], later, atol=close)
    assert_same_weights((yield On(1, alone, group=False))[0], later, atol=close)

    def again(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(TinyGPT), 1, whole=WHOLE[name])
        optimizers = MAKES[name](model)
        onecopy.load(directory, model, optimizers)
        # What is loaded can be saved before it has stepped.
        onecopy.save(directory, model, optimizers).wait()
        onecopy.load(directory, model, optimizers)
        steps(model, optimizers, rank, 2, slice(2, 4))
        return gathered_weights(model)

    assert_same_weights((yield On(2, again))[0], later, atol=0)


@pytest.mark.parametrize("from_whole", [False, True], ids=["cut to whole", "whole to cut"])
@one_fork
def test_layouts_exchange_checkpoints(from_whole: bool, tmp_path: Path) -> Forked:
    """AdamW steps over either. Oracle: the run that saved."""
    layouts = [None, is_matrix]
    if from_whole:
        layouts.reverse()

    def save(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=layouts[0])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        steps(model, [optimizer], rank, 2, slice(2))
        onecopy.save(tmp_path, model, optimizer).wait()
        steps(model, [optimizer], rank, 2, slice(2, 4))
        return gathered_weights(model)

    expected = (yield On(2, save))[0]

    def load(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=layouts[1])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        onecopy.load(tmp_path, model, optimizer)
        steps(model, [optimizer], rank, 2, slice(2, 4))
        return gathered_weights(model)

    assert_same_weights((yield On(2, load))[0], expected, atol=0)


@one_fork
def test_another_kind_of_optimizer_is_told(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        adamw = AdamW(model.parameters(), lr=1e-2)
        steps(model, [adamw], rank, 2, slice(1))
        onecopy.save(tmp_path, model, adamw).wait()
        with pytest.raises(CheckpointError, match="states of AdamW, which Muon cannot continue"):
            onecopy.load(tmp_path, model, MAKES["Muon"](model))

    yield On(2, run)


@one_fork
def test_each_ranks_own_state_dict_goes_round(tmp_path: Path) -> Forked:
    """`torch.save` of `optimizer.state_dict()`, rank by rank. Oracle: the run that saved."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        optimizers = MAKES["Muon"](model)
        steps(model, optimizers, rank, 2, slice(2))
        file = tmp_path / f"{rank}.pt"
        torch.save([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)], file)
        steps(model, optimizers, rank, 2, slice(2, 4))

        other = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        others = MAKES["Muon"](other)
        weights, *states = torch.load(file, weights_only=True)
        other.load_state_dict(weights)
        for optimizer, state in zip(others, states, strict=True):
            optimizer.load_state_dict(state)
        steps(other, others, rank, 2, slice(2, 4))
        assert_same_weights(gathered_weights(other), gathered_weights(model), atol=0)

    yield On(2, run)
