"""Whole weights are read only when they are whole, by whatever way code comes to them. The oracle is plain PyTorch.

Everything that is not whole holds NaN in these tests (`conftest.py`), so a read that comes too early shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import Mine, assert_loop_like_twin, part
from ranks import every_stage


class Aside(nn.Module):
    """Blocks that put a term of the loss aside in every way there is, instead of returning it."""

    class Inner(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how
            self.linear = nn.Linear(10, 10)
            self.probe = nn.Linear(10, 4)
            self.mix = nn.Linear(4, 1)
            self.aux: Tensor | None = None

        def forward(self, x: Tensor, terms: list[Tensor], named: dict[str, Tensor]) -> Tensor:
            y = torch.tanh(self.linear(x))
            term = self.mix(torch.tanh(self.probe(y))).square().mean()
            if self.how == "attribute":
                self.aux = term
            elif self.how == "list":
                terms.append(term)
            elif self.how == "dict":
                named[f"{len(named)}"] = term
            return y

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner(how) for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        terms: list[Tensor] = []
        named: dict[str, Tensor] = {}
        for block in self.blocks:
            x = x + block(x, terms, named)
        terms += [block.aux for block in self.blocks if block.aux is not None]
        loss = F.mse_loss(self.head(x), y)
        # First in the graph of the loss, so that backward comes to them before the blocks' outputs.
        return sum([*terms, *named.values()], start=loss.new_zeros(())) * 0.3 + loss


class Implicit(nn.Module):
    """A fixed point whose gradient is solved for in a hook, which differentiates a kept graph several times."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)
            self.inject = nn.Linear(10, 10)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.linear(z) + self.inject(x))

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 10)
        self.cells = nn.ModuleList([self.Cell(), self.Cell()])
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        for cell in self.cells:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(8):
                    z = cell(z, x)
            z = cell(z, x)
            if torch.is_grad_enabled():
                start = z.clone().detach().requires_grad_()
                again = cell(start, x)

                def solve(gradient: Tensor, again: Tensor = again, start: Tensor = start) -> Tensor:
                    found = gradient
                    for _ in range(5):
                        found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
                    return found

                z.register_hook(solve)
            x = z
        return F.mse_loss(self.head(x), y)


class ReturnsViews(nn.Module):
    """A block returns its weight, and a view that its caller changes in place."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.kept = [self.linear.weight]
            out = self.linear(x).view(-1, 2, 5)
            return out[:, 0], out[:, 1], self.linear.weight

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        extra = x.new_zeros(())
        for block in self.blocks:
            a, b, weight = block(x)
            extra = extra + weight.square().mean() + block.kept[0].abs().mean()
            b = b + 0.0
            b *= 2
            x = torch.cat([a, b], -1)
        return F.mse_loss(self.head(x), y) + extra


class UserHooks(nn.Module):
    """A block under `save_on_cpu`, under hooks that keep what they get, and under activation checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)) for _ in range(4))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with save_on_cpu():
            x = x + self.blocks[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda packed: packed[0]):
            x = x + self.blocks[1](x)
        x = x + checkpoint(self.blocks[2], x, use_reentrant=False)
        x = x + checkpoint(lambda z: self.blocks[3](z).tanh(), x, use_reentrant=False)
        return F.mse_loss(self.head(x), y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"aside in {how}": lambda how=how: Aside(how) for how in ("attribute", "list", "dict")},
    "implicit": Implicit,
    "views": ReturnsViews,
    "hooks": UserHooks,
}


def _loop(model: nn.Module, mine: Mine) -> list[float]:
    optimizer, losses = SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for batch in vector_batches(3):
        loss = model(*mine(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@every_stage
@pytest.mark.parametrize("name", MODELS)
@one_fork
def test_weights_reached_by_odd_ways_train_like_twin(name: str, stage: int, num_ranks: int) -> Forked:
    yield On(
        num_ranks,
        lambda rank: assert_loop_like_twin(rank, num_ranks, _loop, lambda: seeded(MODELS[name]), stage=stage) and None,
    )


@one_fork
def test_activations_saved_by_a_users_own_hooks_pass_through_them() -> Forked:
    """Under `saved_tensors_hooks` of the user's all activations come to them, and at stage 3 no weight does."""

    def run(rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        seen: list[list[tuple[int, ...]]] = []
        for model in (seeded(Stack, 10, 3), onecopy.shard(seeded(Stack, 10, 3), 3)):
            shapes: list[tuple[int, ...]] = []
            seen.append(shapes)

            def pack(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
                shapes.append(tuple(tensor.shape))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(*part(vector_batches(1)[0], rank, 2)).backward()
        plain, sharded = seen
        return plain, sharded

    for plain, sharded in (yield On(2, run)):
        weights = {(10, 20), (20, 10), (10, 3), (3, 10)}
        assert weights & set(plain)
        assert sorted(sharded) == sorted(shape for shape in plain if shape not in weights)


@every_stage
@one_fork
def test_a_graph_of_before_a_step_is_refused(stage: int, num_ranks: int) -> Forked:
    """Plain PyTorch refuses it too: the weights that it saved have been modified."""

    def run(rank: int) -> None:
        for model in (seeded(lambda: Aside("list")), onecopy.shard(seeded(lambda: Aside("list")), stage)):
            optimizer = SGD(model.parameters(), lr=0.1)
            batch = part(vector_batches(1)[0], rank, num_ranks)
            old = model(*batch)
            model(*batch).backward()
            optimizer.step()
            with pytest.raises((RuntimeError, UsageError), match=r"modified by an inplace operation|were changed"):
                old.backward()

    yield On(num_ranks, run)


class WritesToData(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.full((1,), 3.0))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "in place":
            self.scale.data.clamp_(max=1.0)
        elif self.how == "assigned":
            self.scale.data = self.scale.data.clamp(max=1.0)
        else:
            with torch.no_grad():
                self.scale.clamp_(max=1.0)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x) * self.scale, y)


@every_stage
@pytest.mark.parametrize("how", ["in place", "assigned", "no_grad"])
@one_fork
def test_a_write_to_a_parameter_in_forward_is_not_lost_silently(how: str, stage: int, num_ranks: int) -> Forked:
    """Plain PyTorch keeps the write; onecopy refuses it, and says where to make it."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(lambda: WritesToData(how)), stage)
        with pytest.raises(UsageError, match=r"onecopy\.gathered"):
            model(*part(vector_batches(1)[0], rank, num_ranks))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_parameters_frozen_for_a_while(stage: int, num_ranks: int) -> Forked:
    """A discriminator under its generator's step, and adapters during a reference pass: as in one process."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        generator = nn.Linear(10, 10)
        generator.load_state_dict({"weight": torch.eye(10) * 0.5, "bias": torch.zeros(10)})
        optimizer, losses = SGD(model.parameters(), lr=0.1), []
        for batch in vector_batches(3):
            x, y = mine(batch)
            model.requires_grad_(False)
            with torch.no_grad():
                losses.append(model(x, y).item())
            loss = model(generator(x), y)
            loss.backward()
            assert generator.weight.grad is not None
            losses.append(generator.weight.grad[0, 0].item())
            generator.weight.grad = None
            model.requires_grad_(True)
            assert all(parameter.grad is None for parameter in model.parameters())
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, lambda: seeded(Stack, 10, 3), stage=stage)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_frozen_pass_between_forward_and_backward(stage: int, num_ranks: int) -> Forked:
    """As preference training with adapters has it: the reference is the model without them. As in one process."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, losses = SGD(model.parameters(), lr=0.1), []
        for batch in vector_batches(3):
            x, y = mine(batch)
            loss = model(x, y)
            model.requires_grad_(False)
            with torch.no_grad():
                reference = model(x * 0.9, y)
            model.requires_grad_(True)
            (loss - reference).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(reference.item())
        return losses

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, lambda: seeded(Stack, 10, 3), stage=stage)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 3), (2, 2)])
@one_fork
def test_a_gradient_penalty_trains_like_twin(stage: int, num_ranks: int) -> Forked:
    """create_graph=True with respect to inputs, where whole parameters stay for backward."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, losses = SGD(model.parameters(), lr=0.05), []
        for batch in vector_batches(3):
            x, y = mine(batch)
            x = x.clone().requires_grad_()
            loss = model(x, y)
            (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
            (loss + slope.square().sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def run(rank: int) -> None:
        assert_loop_like_twin(rank, num_ranks, loop, lambda: seeded(Smooth), stage=stage)

    yield On(num_ranks, run)


class Smooth(nn.Module):
    """Has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


@one_fork
def test_double_backward_at_stage_3_is_refused_and_works_inside_one_unit() -> Forked:
    """The error names what to do; with ``units=[]`` the whole model is one unit, and its own forward may do it."""

    class Penalised(Smooth):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            loss = super().forward(x, y)
            (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
            return loss + slope.square().sum(1).mean()

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Smooth), 3)
        x, y = part(vector_batches(1)[0], rank, 2)
        x.requires_grad_()
        with pytest.raises(UsageError, match=r"create_graph=True.*stage 1 or 2.*units=\[\]"):
            torch.autograd.grad(model(x, y), x, create_graph=True)
        assert_loop_like_twin(rank, 2, _loop, lambda: seeded(Penalised), stage=3, units=[])

    yield On(2, run)


@every_stage
@pytest.mark.parametrize("how", ["backward(inputs=)", "autograd.grad"])
@one_fork
def test_gradients_taken_past_the_model_are_an_error_at_the_step(how: str, stage: int, num_ranks: int) -> Forked:
    """Plain PyTorch fills them; sharded parameters are not in the graph, and nothing would train."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack, 10, 3), stage)
        optimizer = SGD(model.parameters(), lr=0.1)
        loss = model(*part(vector_batches(1)[0], rank, num_ranks))
        parameters = list(model.parameters())
        if how == "autograd.grad":
            found: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
            assert set(found) == {None}
        else:
            loss.backward(inputs=parameters)
        with pytest.raises(UsageError, match=r"loss\.backward\(\)"):
            optimizer.step()
        model(*part(vector_batches(1)[0], rank, num_ranks)).backward()
        optimizer.step()

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("name", ["jvp", "jacrev", "vmap", "functional_call"])
@one_fork
def test_transforms_of_a_sharded_model_say_what_works(name: str, stage: int, num_ranks: int) -> Forked:
    """torch.func: one sentence that names `gathered`; inside of it they give what plain PyTorch gives."""

    def apply(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return model(x, y)

        if name == "jvp":
            return torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
        if name == "jacrev":
            return torch.func.jacrev(loss)(x)
        if name == "vmap":
            return torch.func.vmap(lambda row, goal: model(row[None], goal[None]))(x, y)
        return torch.func.functional_call(model, {"head.bias": torch.zeros(3)}, (x, y))

    def run(rank: int) -> None:
        twin, model = seeded(Smooth), onecopy.shard(seeded(Smooth), stage)
        batch = part(vector_batches(1)[0], rank, num_ranks)
        with pytest.raises(UsageError, match=r"onecopy\.gathered"):
            apply(model, *batch)
        with onecopy.gathered(model):
            torch.testing.assert_close(apply(model, *batch), apply(twin, *batch))
        model(*batch).backward()

    yield On(num_ranks, run)
