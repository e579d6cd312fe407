"""Reductions of whole tensors on slices: their values on every rank, and their gradients in a loss.

Oracles: the plain tensor, and the whole-batch twin, whose loss has the same penalty.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import NeedsWholeError
from oracle import assert_loop_like_twin
from ranks import every_stage

VALUES: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "mean keepdim": lambda p: p.mean(dim=tuple(range(p.ndim)), keepdim=True),
    "largest": lambda p: p.abs().max(),
    "min": torch.min,
    "amax": lambda p: p.amax(),
    "aminmax": torch.aminmax,
    "any nan": lambda p: p.isnan().any(),
    "all finite": lambda p: p.isfinite().all(),
    "count": torch.count_nonzero,
    "prod": lambda p: (p.abs() + 0.9).prod(),
    "std": torch.std,
    "var": lambda p: torch.var(p, correction=0),
    "square": lambda p: p.pow(2).sum(),
    "norm keepdim": lambda p: torch.linalg.vector_norm(p, 2, dim=tuple(range(p.ndim)), keepdim=True),
}


def _reduced(rank: int, stage: int, num_ranks: int) -> None:
    plain, model = seeded(Stack), onecopy.shard(seeded(Stack), stage)
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        for name, reduce in VALUES.items():
            calls = _calls(model)
            found, expected = reduce(parameter.detach()), reduce(whole.detach())
            torch.testing.assert_close(found, expected, msg=lambda text, n=name: f"{n}: {text}", rtol=1e-5, atol=1e-6)
            assert _calls(model) - calls <= 1, name
        assert torch.equal(parameter, whole)
        assert torch.allclose(parameter, whole + 1e-9)
        assert not torch.equal(parameter, whole + 1)


def _calls(model: nn.Module) -> int:
    return sum(e.calls for e in onecopy.ledger(model).total.entries if e.op == "norm")


@every_stage
@one_fork
def test_reductions_of_all_elements_are_those_of_the_plain_tensor_at_one_collective(
    stage: int, num_ranks: int
) -> Forked:
    yield On(num_ranks, _reduced, stage, num_ranks)


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "square": lambda m: sum((p.pow(2).sum() for p in m.parameters()), torch.zeros(())),
    "sum and mean": lambda m: sum((p.sum() + p.mean() for p in m.parameters()), torch.zeros(())),
    "l1": lambda m: torch.stack([p.abs().sum() for p in m.parameters()]).sum(),
    "norms": lambda m: sum((p.norm() + torch.linalg.vector_norm(p, 1) for p in m.parameters()), torch.zeros(())),
    "largest": lambda m: sum((p.abs().max() + p.amin() for p in m.parameters()), torch.zeros(())),
    "spread": lambda m: sum((p.std() * p.var() for p in m.parameters()), torch.zeros(())),
}


@every_stage
@pytest.mark.parametrize("name", PENALTIES)
@one_fork
def test_a_penalty_in_the_loss_trains_as_in_one_process(name: str, stage: int, num_ranks: int) -> Forked:
    """Three steps, the second with a clear_grad that keeps zeros."""

    def run(rank: int) -> None:
        def loop(model: nn.Module, mine: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> list[float]:
            optimizer, losses = SGD(model.parameters(), lr=0.05), []
            for step, batch in enumerate(vector_batches(3)):
                optimizer.zero_grad(set_to_none=step != 1)
                loss = model(*mine(batch)) + 0.01 * PENALTIES[name](model)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            return losses

        assert_loop_like_twin(rank, num_ranks, loop, lambda: seeded(Stack), stage=stage)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_ranks_that_weigh_a_penalty_differently_take_the_mean(stage: int, num_ranks: int) -> Forked:
    """As every gradient is. Oracle: that of the mean of all ranks' losses, by hand: 2 p times the mean weight."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        penalty = model.head.weight.square().sum()
        (penalty * (rank + 1.0)).backward()
        assert isinstance(model.head.weight.grad, onecopy.SlicedTensor)
        expected = model.head.weight.detach() * (num_ranks + 1)
        torch.testing.assert_close(model.head.weight.grad.local, expected.local)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_a_penalty_in_each_of_several_micro_batches(stage: int) -> Forked:
    """Oracle: the twin."""

    def run(rank: int) -> None:
        def loop(model: nn.Module, mine: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
            optimizer = SGD(model.parameters(), lr=0.05)
            for _ in range(2):
                for batch in vector_batches(2):
                    (0.5 * (model(*mine(batch)) + 0.01 * PENALTIES["square"](model))).backward()
                optimizer.step()
                optimizer.zero_grad()

        assert_loop_like_twin(rank, 2, loop, lambda: seeded(Stack), stage=stage, accumulate=2)

    yield On(2, run)


@one_fork
def test_what_a_slice_cannot_answer_is_refused() -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3)
        weight = model.head.weight
        for refused in (
            lambda: weight.sum(0),
            lambda: weight.mean(dim=1, keepdim=True),
            lambda: weight.max(dim=0),
            lambda: weight.argmax(),
            lambda: weight.median(),
            lambda: weight.softmax(0),
            lambda: torch.linalg.vector_norm(weight, 2, dim=(0,)),
            lambda: torch.linalg.vector_norm(weight, 0),
            lambda: weight.prod(),
        ):
            with pytest.raises(NeedsWholeError, match=r"head\.weight"):
                refused()

    yield On(2, run)
