"""What optimizers outside of torch do, each in a few lines: they train like the twin. Oracle: themselves on the twin.

They use operations that torch tags in no variant, keep states that belong to no parameter, and reduce whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import assert_same_weights, assert_trains_like_twin, gathered_weights, part, whole_weights
from ranks import every_stage


class _Own(Optimizer):
    """A loop over parameters."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Bounded(_Own):
    """As AdaBound: a step of its own for each element, clamped."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        square = state.setdefault("square", torch.zeros_like(p, memory_format=torch.preserve_format))
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        steps = torch.full_like(square, lr).div_(square.sqrt().add_(1e-8)).clamp_(0.001, 0.05)
        p.add_(-steps.mul_(gradient))


class Smooth(_Own):
    """As AdaSmooth: effective ratios of sums of absolute values."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"prev": p.clone(), "s": p.new_zeros(p.shape), "n": torch.zeros_like(p), "step": 0}
        moved = p - state["prev"]
        state["s"].add_(moved)
        state["n"].add_(moved.abs_())
        ratio = torch.div(state["s"].sum(), state["n"].sum().add_(1e-6)).abs_().clamp_(0.1, 1.0)
        state["prev"].copy_(p)
        p.sub_(gradient * ratio, alpha=lr)


class Signed(_Own):
    """As Grams: the size of momentum, the sign of the gradient."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(gradient, weight=0.1)
        update = momentum.div(gradient.square().add_(1e-3), rounding_mode=None).abs_().mul_(gradient.sign())
        p.add_(update, alpha=-lr)


class Averaged(_Own):
    """As MADGRAD: a counter beside the parameters' states, cube roots, and sums from the beginning."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        count = self.state.setdefault("k", torch.tensor([0]))  # type: ignore[call-overload]
        weight = lr * float(count + 1) ** 0.5
        if not state:
            state |= {"squares": torch.zeros_like(p), "sum": torch.zeros_like(p), "start": p.clone()}
        state["squares"].addcmul_(gradient, gradient, value=weight)
        root = state["squares"].pow(1 / 3).add_(1e-6)
        root.masked_fill_(root == 0, float("inf"))
        state["sum"].add_(gradient, alpha=weight)
        p.copy_(state["start"].addcdiv(state["sum"], root, value=-1))


class Trusted(_Own):
    """As LAMB and clipping by value: ratios of norms, largest elements, double precision in between."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        if not bool(gradient.isfinite().all()):
            return
        wide = p.double()
        ratio = (wide.norm() / gradient.norm().add(1e-8)).clamp(0, 10)
        scaled = gradient / gradient.abs().max().clamp_(min=1e-8) * ratio + 0.01 * gradient.std()
        p.copy_(wide - lr * scaled.double())


@every_stage
@pytest.mark.parametrize("kind", [Bounded, Smooth, Signed, Averaged, Trusted])
@one_fork
def test_optimizer_of_others_trains_like_twin(kind: Callable[[Any], Optimizer], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank, num_ranks, lambda: seeded(Stack), vector_batches(3), stage=stage, optimizer=kind, rtol=1e-5, atol=1e-5
        )

    yield On(num_ranks, run)


@pytest.mark.parametrize("make", [Adam, AdamW])
@one_fork
def test_a_learning_rate_that_is_a_tensor(make: Any) -> Forked:
    """Left to torch's loop over parameters, for its lists refuse one."""

    def run(rank: int) -> None:
        for stage in (0, 1, 2, 3):
            assert_trains_like_twin(
                rank,
                2,
                lambda: seeded(Stack),
                vector_batches(3),
                stage=stage,
                optimizer=lambda p: make(p, lr=torch.tensor(1e-2)),
                atol=1e-5,
            )

    yield On(2, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_a_closure_that_computes_the_last_micro_batch(stage: int) -> Forked:
    """What stands in p.grad before it has run is not what the step takes. Oracle: the twin; also by keyword."""

    def run(rank: int) -> None:
        model, twin = onecopy.shard(seeded(Stack), stage), seeded(Stack)
        optimizer, expected = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
        first, second = vector_batches(2)
        for by_name in (False, True):
            with model.no_sync():
                model(*part(first, rank, 2)).backward()

            def closure() -> Tensor:
                loss: Tensor = model(*part(second, rank, 2))
                loss.backward()
                return loss

            returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            assert isinstance(returned, Tensor)
            optimizer.zero_grad()
            twin(*first).backward()
            twin(*second).backward()
            expected.step()
            expected.zero_grad()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(2, run)


@pytest.mark.parametrize("fused", [True, False])
@one_fork
def test_a_compiled_step_is_refused_in_one_sentence(fused: bool) -> Forked:
    """Nothing has changed then. Oracle: the weights as built."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3)
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
        compiled = torch.compile(optimizer.step, backend="eager")
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        with pytest.raises(UsageError, match=r"torch\.compile.*optimizer\.step\(\)"):
            compiled()
        assert_same_weights(gathered_weights(model), whole_weights(seeded(Stack)), atol=0)

    yield On(2, run)


def test_a_device_with_its_number_is_the_device() -> None:
    """`cpu:0` is `cpu`: nothing is moved, and nothing refused."""
    model = onecopy.shard(nn.Linear(3, 2), 3)
    weight = model.weight
    assert model.to("cpu:0") is model
    assert model.weight is weight
    state = torch.zeros_like(model.weight, device="cpu:0")
    assert isinstance(state, onecopy.SlicedTensor)
    model.weight.data = torch.ones(2, 3, device=torch.device("cpu", 0))
    assert model.weight.sum().item() == 6.0
