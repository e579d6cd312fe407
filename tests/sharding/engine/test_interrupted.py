"""A forward or backward that ends with an exception, which the user catches and goes on.

The oracle is the twin, interrupted at the same places. After a KeyboardInterrupt torch runs no hooks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from models import Chain, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.sharding.tensor.sliced import SlicedTensor
from oracle import Mine, assert_loop_like_twin, assert_same_weights, gathered_weights, whole_weights
from ranks import every_stage

WHERE = ["forward", "evaluation", "backward"]
KINDS = [ArithmeticError, KeyboardInterrupt]


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[BaseException]) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ctx.kind("on purpose")


class Fragile(Chain):
    """Raises ``kind`` in block ``at``, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(10, 10), nn.Tanh(), _Trap()))

    def arm(self, at: int, where: str, kind: type[BaseException]) -> None:
        self.blocks[at][2].armed = (where, kind)  # type: ignore[index]


class _Trap(nn.Module):
    armed: tuple[str, type[BaseException]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed is None:
            return x
        (where, kind), self.armed = self.armed, None
        if where == "backward":
            return _Raise.apply(x, kind)  # type: ignore[no-any-return,no-untyped-call]
        raise kind("on purpose")


def _interrupted(model: nn.Module, batch: tuple[Tensor, ...], at: int, where: str, kind: type[BaseException]) -> None:
    model.arm(at, where, kind)  # type: ignore[operator]
    with pytest.raises(kind), torch.set_grad_enabled(where != "evaluation"):
        model(*batch).backward()


@every_stage
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
@one_fork
def test_training_goes_on_like_twin(where: str, kind: type[BaseException], stage: int, num_ranks: int) -> Forked:
    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, losses = SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for step, batch in enumerate(vector_batches(5)):
            if step:
                _interrupted(model, mine(batch), step % 3, where, kind)
                optimizer.zero_grad()
            loss = model(*mine(batch))
            loss.backward()
            if step == 3:
                _interrupted(model, mine(batch), 0, "evaluation", kind)
                model(*mine(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, lambda: seeded(Fragile), stage=stage)

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
@one_fork
def test_the_model_can_be_looked_at_and_saved(
    where: str, kind: type[BaseException], stage: int, num_ranks: int, tmp_path: Path
) -> Forked:
    """Right after it: all parameters are slices in the master dtype, and no module shows a bf16 copy of a unit."""

    def run(rank: int) -> None:
        plain = seeded(Fragile)
        batch = vector_batches(1)[0]
        model = onecopy.shard(seeded(Fragile), stage, precision="bf16")
        _interrupted(model, batch, 1, where, kind)
        assert_same_weights(gathered_weights(model), whole_weights(plain))
        _interrupted(model, batch, 2, where, kind)
        onecopy.save(tmp_path, model)
        assert all(isinstance(p, SlicedTensor) for p in model.parameters())
        other = Fragile()
        onecopy.load(tmp_path, other)
        assert_same_weights(whole_weights(other), whole_weights(plain))
        assert torch.is_autocast_cache_enabled()

    yield On(num_ranks, run)
