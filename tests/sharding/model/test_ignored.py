"""`shard(ignored=)`: parameters that stay plain, and are averaged by the training loop or by nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import SettingsError, UsageError
from oracle import OPTIMIZERS, Mine, gathered_weights, part, whole_weights
from ranks import every_stage

WAYS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "a name": lambda model: ["blocks.1.0.weight", "head.bias"],
    "a module's name, and a module": lambda model: ["blocks.1", model.head],
    "parameters": lambda model: [model.blocks[0][0].weight, model.head.weight, model.head.bias],
}


def _loop(model: nn.Module, mine: Mine) -> list[float]:
    """Clips, accumulates over two micro-batches, and averages the gradients of plain parameters itself."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for number, batch in enumerate(vector_batches(6), start=1):
        loss = model(*mine(batch))
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 == 0:
            if isinstance(next(iter(model.parameters())).grad, Tensor) and hasattr(model, "no_sync"):
                for parameter in model.parameters():
                    if not isinstance(parameter, onecopy.SlicedTensor):
                        assert type(parameter.grad) is Tensor
                        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                        parameter.grad /= dist.get_world_size()
            norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses + norms


@every_stage
@pytest.mark.parametrize("way", WAYS)
@one_fork
def test_ignored_parameters_that_the_loop_averages_train_like_twin(way: str, stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        left = [name for name, _ in _ignored(seeded(Stack), way)]
        held: list[nn.Parameter] = []

        def build() -> nn.Module:
            model = seeded(Stack)
            held[:] = [parameter for _, parameter in _ignored(model, way)]
            return model

        twin = build()
        expected = _loop(twin, lambda batch: batch)
        model = build()
        onecopy.shard(model, stage, ignored=WAYS[way](model), accumulate=2)
        found = _loop(model, lambda batch: part(batch, rank, num_ranks))
        assert [name for name, p in model.named_parameters() if not isinstance(p, onecopy.SlicedTensor)] == left
        assert all(any(p is own for own in held) for p in model.parameters() if not isinstance(p, onecopy.SlicedTensor))
        total = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(total)
        assert (total / num_ranks).tolist() == pytest.approx(expected, rel=1e-5)
        weights = gathered_weights(model)
        for name, value in whole_weights(twin).items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)

    yield On(num_ranks, run)


def _ignored(model: nn.Module, way: str) -> list[tuple[str, nn.Parameter]]:
    """Which those are, by hand."""
    chosen = {
        "a name": ["blocks.1.0.weight", "head.bias"],
        "a module's name, and a module": ["blocks.1.", "head."],
        "parameters": ["blocks.0.0.weight", "head."],
    }[way]
    return [(name, p) for name, p in model.named_parameters() if name.startswith(tuple(chosen))]


@every_stage
@one_fork
def test_ignored_parameters_are_each_ranks_own(stage: int, num_ranks: int, tmp_path: Path) -> Forked:
    """Neither made equal nor averaged; gathered, saved (the first rank's) and exported with the rest. By hand."""

    def run(rank: int) -> None:
        model = seeded(Stack)
        with torch.no_grad():
            model.head.bias.fill_(rank)
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        onecopy.shard(model, stage, ignored=["head.bias"], optimizer=optimizer)
        x, y = part(vector_batches(1)[0], rank, num_ranks)
        plain = seeded(Stack)
        with torch.no_grad():
            plain.head.bias.fill_(rank)
        plain(x, y).backward()
        model(x, y).backward()
        torch.testing.assert_close(model.head.bias.grad, plain.head.bias.grad)
        optimizer.step()
        assert (model.head.bias - rank).abs().max() < 0.01
        with onecopy.gathered(model):
            assert model.head.weight.shape == (3, 10)
        onecopy.save(tmp_path, model, optimizer)
        own = model.head.bias.detach().clone()
        onecopy.load(tmp_path, model, optimizer)
        first = [own]
        dist.broadcast_object_list(first)
        assert torch.equal(model.head.bias, first[0])

    yield On(num_ranks, run)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-loop", "sgd"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@one_fork
def test_a_scaler_skips_a_step_for_plain_and_sliced_parameters_alike(optimizer: str, stage: int) -> Forked:
    """Oracle: the plain model on one process. The ignored gradient is averaged by the loop, as ever."""

    def loop(model: nn.Module, mine: Mine, averages: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        found = OPTIMIZERS[optimizer](model.parameters())
        for number, (x, y) in enumerate(vector_batches(4)):
            scaler.scale(model(*mine((x, y * (float("inf") if number == 1 else 1))))).backward()
            if averages:
                dist.all_reduce(model.head.bias.grad)
                model.head.bias.grad /= 2
            scaler.step(found)
            scaler.update()
            found.zero_grad()
        assert scaler.get_scale() == 2.0

    def run(rank: int) -> None:
        twin = seeded(Stack)
        loop(twin, lambda batch: batch, averages=False)
        model = onecopy.shard(seeded(Stack), stage, ignored=["head.bias"])
        loop(model, lambda batch: part(batch, rank, 2), averages=True)
        for name, value in whole_weights(twin).items():
            torch.testing.assert_close(gathered_weights(model)[name], value, rtol=0, atol=1e-6)

    yield On(2, run)


@one_fork
def test_an_ignored_parameter_on_meta_gets_memory_and_the_values_of_its_module() -> Forked:
    def run(rank: int) -> None:
        with torch.device("meta"):
            model = Stack()
        onecopy.shard(model, 3, ignored=["head"])
        onecopy.materialize(model, "cpu", init=lambda m: [nn.init.constant_(p, 2.5) for p in m._parameters.values()])
        assert torch.equal(model.head.weight, torch.full((3, 10), 2.5))
        model(*vector_batches(1)[0]).backward()
        assert model.head.weight.grad is not None

    yield On(2, run)


@pytest.mark.parametrize(
    "ignored, words",
    [
        ("head", ["list", "str"]),
        (["hea.weight"], ["'hea.weight'", "'head.weight'"]),
        ([nn.Linear(1, 1)], ["Linear", "no module"]),
        ([nn.Parameter(torch.zeros(1))], ["Parameter", "no parameter"]),
        (["blocks", "head"], ["no parameters to shard"]),
    ],
)
def test_what_cannot_be_ignored_is_named(ignored: Any, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        onecopy.shard(Stack(), 2, ignored=ignored)
    assert all(word in str(caught.value) for word in words)


@one_fork
def test_a_parameter_that_came_later_is_not_taken_for_an_ignored_one() -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 2, ignored=["head.bias"])
        model.head._parameters["bias"] = nn.Parameter(torch.zeros(3))
        with pytest.raises(UsageError, match=r"head\.bias"):
            model(*vector_batches(1)[0])

    yield On(1, run)
