"""SlicedTensor: elementwise operations, norms and errors. Oracle: the same operation on the whole plain tensor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.errors import NeedsWholeError, UsageError
from onecopy.sharding.tensor.sliced import SlicedTensor


class Two(nn.Module):
    """Two parameters of odd sizes, so that slices cut through them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = nn.Parameter(torch.randn(5, 7, generator=generator))
        self.v = nn.Parameter(torch.randn(3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).sum() + self.v.sum()


def whole_of(sliced: Tensor) -> Tensor:
    """Put slices together by hand, without onecopy's own gather."""
    assert isinstance(sliced, SlicedTensor)
    flat = torch.zeros(sliced.numel())
    flat[sliced.slicing.start : sliced.slicing.start + sliced.slicing.numel] = sliced.local.detach().float()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    return flat.view(sliced.shape)


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + 2 * b,
    "mul_": lambda a, b: a.clone().mul_(b),
    "lerp": lambda a, b: a.lerp(b, 0.25),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1, value=0.5),
    "sqrt abs": lambda a, b: a.abs().sqrt(),
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "zeros_like": lambda a, b: torch.zeros_like(a) + 1,
    "full_like": lambda a, b: torch.full_like(a, 3.0),
    "copy_": lambda a, b: torch.empty_like(a).copy_(b),
    "fill_": lambda a, b: a.clone().fill_(2.0),
    "times 0-dim": lambda a, b: a * torch.tensor(0.5),
    "foreach": lambda a, b: torch._foreach_mul([a, b], [b, a])[1],
    "foreach_": lambda a, b: _foreach_add_in_place(a, b),
    "to float64": lambda a, b: a.detach().double() + b.detach().double(),
}


def _foreach_add_in_place(a: Tensor, b: Tensor) -> Tensor:
    total = [a.clone(), b.clone()]
    torch._foreach_add_(total, [b, a], alpha=0.5)
    return total[0]


def _elementwise(rank: int) -> dict[str, float]:
    reference = Two()
    model = onecopy.shard(Two(), 3)
    other = {"w": torch.arange(35.0).view(5, 7) / 10, "v": torch.tensor([1.0, -2.0, 3.0])}
    errors = {}
    for name, operation in ELEMENTWISE.items():
        for key in ("w", "v"):
            plain, sliced = getattr(reference, key).detach(), getattr(model, key).detach()
            second = torch.zeros_like(sliced)
            second.copy_(other[key])
            got = operation(sliced, second)
            assert isinstance(got, SlicedTensor), name
            assert got.shape == plain.shape
            errors[f"{name} {key}"] = (whole_of(got) - operation(plain, other[key]).float()).abs().max().item()
    return errors


@pytest.mark.parametrize("num_ranks", [1, 3])
@one_fork
def test_elementwise_operations_equal_those_on_the_whole_tensor(num_ranks: int) -> Forked:
    for errors in (yield On(num_ranks, _elementwise)):
        assert max(errors.values()) == 0.0, errors


def _norms(rank: int) -> list[float]:
    model = onecopy.shard(Two(), 3)
    parameters = [model.w.detach(), model.v.detach()]
    values = [torch.linalg.vector_norm(p, order).item() for p in parameters for order in (1, 2, 3.5, float("inf"))]
    values += [norm.item() for norm in torch._foreach_norm(parameters, 2)]
    values += [model.w.detach().norm().item(), torch.norm(model.v.detach(), 1).item()]
    values.append(torch.nn.utils.get_total_norm(parameters).item())
    # With a plain tensor beside them, a partial norm must be finished before it is stacked.
    values.append(torch.nn.utils.get_total_norm([*parameters, torch.tensor([3.0, 4.0])]).item())
    calls = sum(e.calls for e in onecopy.ledger(model).total.entries if e.op == "norm")
    torch.nn.utils.get_total_norm(parameters)
    after = sum(e.calls for e in onecopy.ledger(model).total.entries if e.op == "norm")
    return [*values, float(after - calls)]


@one_fork
def test_norms_are_global_on_every_rank_at_one_collective_a_call() -> Forked:
    """Oracle: norms of the whole plain tensors."""
    w, v = (p.detach() for p in Two().parameters())
    expected = [torch.linalg.vector_norm(p, order).item() for p in (w, v) for order in (1, 2, 3.5, float("inf"))]
    expected += [w.norm().item(), v.norm().item(), w.norm().item(), v.norm(1).item()]
    total = (w.square().sum() + v.square().sum()).item()
    expected += [total**0.5, (total + 25.0) ** 0.5]
    for values in (yield On(3, _norms)):
        assert values[:-1] == pytest.approx(expected, rel=1e-6)
        assert values[-1] == 1.0


def _refusals(rank: int) -> list[str]:
    model = onecopy.shard(Two(), 3)
    messages = []
    attempts: list[Callable[[], object]] = [
        lambda: model.w @ model.w.t(),
        lambda: model.w.sum(0),
        lambda: model.w.detach().mean(dim=1, keepdim=True),
        lambda: model.w.detach() + torch.ones(7),
        lambda: torch.ones(5, 7).add_(model.w.detach()),
        lambda: torch.linalg.vector_norm(model.w.detach(), 2, dim=(0,)),
        lambda: nn.init.normal_(model.w),
        lambda: model.v.detach()[0],
    ]
    for attempt in attempts:
        with pytest.raises(NeedsWholeError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


@one_fork
def test_what_needs_whole_parameters_names_them_and_says_gathered() -> Forked:
    for messages in (yield On(2, _refusals)):
        assert all("'w'" in message or "'v'" in message for message in messages), messages
        assert all("onecopy.gathered" in message for message in messages), messages


def test_copies_and_pickles_are_refused_and_states_may_be_copied() -> None:
    model = onecopy.shard(Two(), 3)
    with pytest.raises(UsageError, match=r"deep-copied.*'Two'"):
        copy.deepcopy(model)
    with pytest.raises(UsageError, match=r"torch\.save"):
        pickle.dumps(model.w)
    state = torch.ones_like(model.w)
    twin = copy.deepcopy(state)
    twin.zero_()
    assert isinstance(state, SlicedTensor)
    assert state.local.sum().item() == 35.0


def _assign_data(rank: int) -> None:
    """As momentum encoders and vector_to_parameters do. torch's own setter would change the wrapper and no value."""
    plain, model = Two(), onecopy.shard(Two(), 3)
    inputs = torch.ones(2, 5)
    model(inputs).backward()
    for both in (plain, model):
        both.w.data = both.w.data * 0.5 + both.w.detach()
        both.v.data = torch.tensor([4.0, 5.0, 6.0])
    for name in ("w", "v"):
        torch.testing.assert_close(whole_of(getattr(model, name)), getattr(plain, name).detach(), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))
    model.w.grad.data = torch.full((5, 7), 2.0)  # type: ignore[union-attr]
    assert model.w.grad is not None
    torch.testing.assert_close(whole_of(model.w.grad), torch.full((5, 7), 2.0))
    for wrong in (torch.ones(7, 5), torch.ones(5, 7, dtype=torch.float64), model.v.data):
        with pytest.raises(UsageError, match=r"'w' is sharded as \(\(5, 7\), torch\.float32"):
            model.w.data = wrong


@one_fork
def test_assigning_data_writes_to_the_slices() -> Forked:
    yield On(3, _assign_data)


def test_isinstance_shape_dtype_and_repr_tell_the_truth() -> None:
    model = onecopy.shard(Two(), 3)
    assert isinstance(model.w, nn.Parameter)
    assert isinstance(model.w, SlicedTensor)
    assert (model.w.ndim, tuple(model.w.shape), model.w.dtype) == (2, (5, 7), torch.float32)
    assert "'w'" in repr(model.w)
    assert "(5, 7)" in repr(model.w)


def _gradient_scaler(rank: int) -> tuple[float, float]:
    """An infinity in one rank's slice alone is found by both."""
    model = onecopy.shard(Two(), 3)
    model(torch.ones(2, 5)).backward()
    gradient = model.w.grad
    assert isinstance(gradient, SlicedTensor)
    if rank == 1:
        gradient.local[0] = float("inf")
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient, model.v.grad], found, torch.tensor([0.5]))
    return found.item(), model.v.grad.local.sum().item()  # type: ignore[union-attr]


@one_fork
def test_an_infinity_on_one_rank_is_found_on_all() -> Forked:
    results = yield On(2, _gradient_scaler)
    assert [found for found, _ in results] == [1.0, 1.0]
    # v has 3 elements with gradient 1 each, halved by the unscaling, over both ranks together.
    assert sum(total for _, total in results) == pytest.approx(1.5)
