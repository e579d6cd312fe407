"""Whole parameters on request: gathered, write, state_dict and load_state_dict, inside the block and outside it.

The oracle is the plain model with the same seed, and torch's own copy, load and generate on it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import CollectiveError, UsageError
from oracle import OPTIMIZERS, assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import every_stage
from stack_loops import stack


def _train(model: nn.Module, rank: int, num_ranks: int, steps: int = 2) -> None:
    batches = [part(batch, rank, num_ranks) for batch in vector_batches(steps)]
    train(model, OPTIMIZERS["sgd"](model.parameters()), batches)


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
@one_fork
def test_gathered_parameters_are_the_plain_ones(precision: str | None, stage: int, num_ranks: int) -> Forked:
    """Plain `nn.Parameter`s in the master dtype, contiguous, and SlicedTensors again after the block."""

    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage, precision=precision)
        sliced = list(model.parameters())
        with onecopy.gathered(model) as inside:
            assert inside is model
            for name, parameter in model.named_parameters():
                assert type(parameter) is nn.Parameter
                assert parameter.is_leaf
                assert torch.equal(parameter, plain.get_parameter(name))
        assert all(a is b for a, b in zip(model.parameters(), sliced, strict=True))
        assert all(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_gathered_takes_a_module_a_parameter_or_several(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        with onecopy.gathered(model.blocks[1]) as block:
            assert torch.equal(block[0].weight, plain.blocks[1][0].weight)
            assert isinstance(model.blocks[0][0].weight, onecopy.SlicedTensor)
        with onecopy.gathered(model.head.bias) as bias:
            assert torch.equal(bias, plain.head.bias)
            assert model.head.bias is bias
        with onecopy.gathered([model.head.weight, model.blocks[0][0].bias]) as (weight, bias):
            assert torch.equal(weight, plain.head.weight)
            assert torch.equal(bias, plain.blocks[0][0].bias)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_gathered_sees_what_the_optimizer_wrote(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        optimizers = [OPTIMIZERS["adamw-fused"](m.parameters()) for m in (plain, model)]
        for batch in vector_batches(3):
            train(plain, optimizers[0], [batch])
            train(model, optimizers[1], [part(batch, rank, num_ranks)])
            assert_same_weights(gathered_weights(model), whole_weights(plain))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_writes_are_the_first_ranks_and_are_trained_on(stage: int, num_ranks: int) -> Forked:
    """Every rank writes something else; rank 0's counts, on all of them, also for the forward that follows."""

    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        model(*part(vector_batches(1)[0], rank, num_ranks))
        with onecopy.gathered(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5 + rank)
            model.blocks[2][0].weight[3] = rank
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.5)
            plain.blocks[2][0].weight[3] = 0
        assert_same_weights(gathered_weights(model), whole_weights(plain), atol=0)
        _train(model, rank, num_ranks)
        _train(plain, 0, 1)
        assert_same_weights(gathered_weights(model), whole_weights(plain))

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("initialise", [nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_])
@one_fork
def test_initialising_inside_gathered_equals_initialising_the_plain_model(
    initialise: Callable[[Tensor], Any], stage: int, num_ranks: int
) -> Forked:
    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        torch.manual_seed(5)
        initialise(plain.head.weight)
        torch.manual_seed(5 + rank)
        with onecopy.gathered(model.head, write=True):
            initialise(model.head.weight)
        assert torch.equal(gathered_weights(model)["head.weight"], plain.head.weight)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_write_without_saying_so_is_an_error(stage: int, num_ranks: int) -> Forked:
    """It would be lost, or differ from rank to rank. The model keeps its values and goes on."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(UsageError, match="write=True"), onecopy.gathered(model), torch.no_grad():
            model.head.weight.add_(1)
        assert_same_weights(gathered_weights(model), whole_weights(stack()), atol=0)
        _train(model, rank, num_ranks)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_an_error_inside_the_block_leaves_the_model_sharded_and_unchanged(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)

        def fail() -> None:
            with onecopy.gathered(model, write=True), torch.no_grad():
                model.head.weight.zero_()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert all(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())
        assert_same_weights(gathered_weights(model), whole_weights(stack()), atol=0)
        _train(model, rank, num_ranks)

    yield On(num_ranks, run)


@one_fork
def test_a_gather_that_fails_at_the_blocks_begin_leaves_the_model_sharded_and_in_use() -> Forked:
    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), 3)
        bucket = model._onecopy_engine.units[1].buckets[0]
        lost = CollectiveError("on purpose")
        with (
            mock.patch.object(bucket, "gather_masters", side_effect=lost),
            pytest.raises(CollectiveError, match="on purpose"),
            onecopy.gathered(model),
        ):
            pass
        assert all(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())
        batch = vector_batches(1)[0]
        assert torch.equal(model(*batch), plain(*batch))

    yield On(2, run)


@every_stage
@one_fork
def test_generating_inside_gathered_equals_the_plain_model(stage: int, num_ranks: int) -> Forked:
    """A loop of its own length on every rank, which would hang outside of it at stage 3."""

    def generate(model: TinyGPT, length: int) -> list[int]:
        tokens = torch.tensor([[3]])
        with torch.no_grad():
            for _ in range(length):
                tokens = torch.cat([tokens, model.logits(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens[0].tolist()

    def run(rank: int) -> None:
        plain, model = seeded(TinyGPT), onecopy.shard(seeded(TinyGPT), stage)
        with onecopy.gathered(model):
            assert generate(model, 3 + rank) == generate(plain, 3 + rank)
            assert torch.equal(model(*token_batches(1)[0]), plain(*token_batches(1)[0]))

    yield On(num_ranks, run)


class Mixed(nn.Module):
    """Float inputs, a list as cache, a frozen block, BatchNorm, a block that returns fp32, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x + past[0])).float()
        past.append(x)
        return self.decode(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.to(self.head.weight.dtype)))


@every_stage
@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
@one_fork
def test_modules_compute_inside_gathered_as_in_training(precision: str | None, stage: int, num_ranks: int) -> Forked:
    """Oracle: the model's own forward outside of the block, to the last bit; parameters are masters all the same."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Mixed), stage, precision=precision).eval()
        x, past = torch.randn(4, 10), [torch.ones(10)]
        with torch.no_grad():
            expected, cached = model(x, past), past[1]
            masters = gathered_weights(model)
            with onecopy.gathered(model):
                past = [torch.ones(10)]
                for mode in (torch.no_grad(), torch.inference_mode()):
                    with mode:
                        assert torch.equal(model(x, past), expected)
                assert torch.equal(past[1], cached)
                assert past[0].dtype == torch.float32
                assert expected.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[precision]
                # Around the root's forward, as PEFT's generate goes: from module to module.
                y = x
                for block in model.blocks:
                    y = torch.tanh(block(y.to(expected.dtype) + 1)).float()
                assert torch.equal(model.decode(y), expected)
                with pytest.raises((IndexError, TypeError)):
                    model(x, [])
                assert {p.dtype for p in model.parameters()} == {torch.float32}
                assert_same_weights(whole_weights(model), masters, atol=0)
            assert torch.equal(model(x, [torch.ones(10)]), expected)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_what_is_edited_inside_gathered_is_computed_with_at_once(stage: int, num_ranks: int) -> Forked:
    """Oracle: a plain bf16 model with the same edits. What a forward writes would be lost, and is an error."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage, precision="bf16")
        x = torch.randn(2, 10)
        with torch.no_grad(), onecopy.gathered(model, write=True):
            before = model.head(x)
            assert torch.equal(before, stack().bfloat16().head(x.bfloat16()))
            model.head.weight.mul_(2)
            model.head.bias.data.mul_(2)
            assert torch.equal(model.head(x), 2 * before)
            model.head.register_forward_pre_hook(lambda module, _: [module.bias.add_(1), None][1])
            with pytest.raises(UsageError, match="between two calls"):
                model.head(x)
        assert model.head.weight.dtype == torch.float32

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_what_gathered_refuses(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(UsageError, match="sharded"), onecopy.gathered(nn.Linear(2, 2)):
            pass
        with onecopy.gathered(model):
            loss = model(*part(vector_batches(1)[0], rank, 2))
            with pytest.raises(UsageError, match="gathered"):
                loss.backward()
        _train(model, rank, 2)

    yield On(2, run)


@every_stage
@one_fork
def test_what_is_assigned_to_data_inside_the_block_is_kept_or_refused(stage: int, num_ranks: int) -> Forked:
    """As `weight.data = …` does. By hand."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with onecopy.gathered(model, write=True):
            model.head.weight.data = torch.full((3, 10), 2.0)
        assert torch.equal(gathered_weights(model)["head.weight"], torch.full((3, 10), 2.0))
        with pytest.raises(UsageError, match="write=True"), onecopy.gathered(model):
            model.head.weight.data = torch.zeros(3, 10)
        assert torch.equal(gathered_weights(model)["head.weight"], torch.full((3, 10), 2.0))
        _train(model, rank, num_ranks)

    yield On(num_ranks, run)


# --- other slices than parameters


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16-lean"])
@one_fork
def test_gathered_gradients_and_states_are_the_twins(precision: str | None, stage: int, num_ranks: int) -> Forked:
    """`p.grad` and AdamW's averages, alone and in lists with parameters. Oracle: the twin's; bf16 to its rounding."""

    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage, precision=precision)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision is None else {"rtol": 0.05, "atol": 0.05}
        pairs = [(m, AdamW(m.parameters(), lr=1e-3)) for m in (plain, model)]
        for (m, _), batch in zip(
            pairs, (vector_batches(1)[0], part(vector_batches(1)[0], rank, num_ranks)), strict=True
        ):
            m(*batch).backward()
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            with onecopy.gathered(parameter.grad) as gradient:
                assert type(gradient) is Tensor
                torch.testing.assert_close(gradient, whole.grad, **tolerance)
        for _, optimizer in pairs:
            optimizer.step()
        states, expected = pairs[1][1].state[model.head.weight], pairs[0][1].state[plain.head.weight]
        with onecopy.gathered([states["exp_avg"], model.head.bias, states["exp_avg_sq"]]) as (first, bias, second):
            torch.testing.assert_close(first, expected["exp_avg"], **tolerance)
            torch.testing.assert_close(second, expected["exp_avg_sq"], **tolerance)
            torch.testing.assert_close(bias, plain.head.bias, **tolerance)

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_whole_gradient_may_be_written(stage: int, num_ranks: int) -> Forked:
    """The first rank's, or another's; by hand. Without write=True it is an error."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        model(*part(vector_batches(1)[0], rank, num_ranks)).backward()
        for source, expected in ((None, 1.0), (num_ranks - 1, float(num_ranks))):
            with onecopy.gathered(model.head.weight.grad, write=True, source=source) as gradient:
                gradient.fill_(rank + 1.0)
            with onecopy.gathered(model.head.weight.grad) as gradient:
                assert torch.equal(gradient, torch.full((3, 10), expected))
        with pytest.raises(UsageError, match="write=True"), onecopy.gathered(model.head.weight.grad) as gradient:
            gradient.zero_()

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_any_rank_may_be_the_source_of_what_is_written(stage: int, num_ranks: int) -> Forked:
    """Every rank writes something else. A rank that does not exist is an error on all."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with onecopy.gathered(model, write=True, source=1), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        assert all(torch.equal(w, torch.ones_like(w)) for w in gathered_weights(model).values())
        with pytest.raises(UsageError, match="source=7"), onecopy.gathered(model, write=True, source=7):
            pass
        _train(model, rank, num_ranks)

    yield On(num_ranks, run)


@one_fork
def test_a_source_on_two_axes() -> Forked:
    """Of four ranks in two groups of copies, the last."""

    def run(rank: int) -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = onecopy.shard(stack(), 3, mesh=mesh)
        with onecopy.gathered(model, write=True, source=3), torch.no_grad():
            model.head.weight.fill_(rank)
        assert torch.equal(gathered_weights(model)["head.weight"], torch.full((3, 10), 3.0))

    yield On(4, run)


@pytest.mark.parametrize("stage", [0, 1])
@one_fork
def test_a_gradient_that_waits_is_not_gathered(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage, accumulate=2)
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        with pytest.raises(UsageError, match="has not been reduced yet"), onecopy.gathered(model.head.weight.grad):
            pass

    yield On(2, run)


# --- state_dict


@every_stage
@one_fork
def test_state_dict_has_the_plain_models_names_shapes_and_dtypes(stage: int, num_ranks: int) -> Forked:
    """Outside the block as SlicedTensors of true shape, tied names and all; inside it whole, equal to the plain one."""

    def run(rank: int) -> None:
        expected, model = seeded(TinyGPT).state_dict(), onecopy.shard(seeded(TinyGPT), stage)
        outside = model.state_dict()
        assert list(outside) == list(expected)
        for name, value in outside.items():
            assert isinstance(value, onecopy.SlicedTensor)
            assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
        with onecopy.gathered(model):
            inside = {name: value.clone() for name, value in model.state_dict().items()}
        assert list(inside) == list(expected)
        assert all(torch.equal(inside[name], value) for name, value in expected.items())

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("where", ["inside", "outside"])
@one_fork
def test_a_whole_state_dict_loads(where: str, stage: int, num_ranks: int) -> Forked:
    """Inside the block as into a plain model; outside it every rank cuts its slice out of what it was given."""

    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.9).add_(0.01)
        model(*part(vector_batches(1)[0], rank, num_ranks))
        if where == "inside":
            with onecopy.gathered(model, write=True):
                result = model.load_state_dict(plain.state_dict())
        else:
            result = model.load_state_dict(plain.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_same_weights(gathered_weights(model), whole_weights(plain), atol=0)
        _train(model, rank, num_ranks)
        _train(plain, 0, 1)
        assert_same_weights(gathered_weights(model), whole_weights(plain))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_sliced_state_dict_goes_back(stage: int, num_ranks: int) -> Forked:
    """Kept before two steps as copies, and loaded after them."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        _train(model, rank, num_ranks)
        assert not torch.equal(gathered_weights(model)["head.weight"], stack().head.weight)
        model.load_state_dict(kept)
        assert_same_weights(gathered_weights(model), whole_weights(stack()), atol=0)
        plain = stack()
        _train(plain, 0, 1)
        _train(model, rank, num_ranks)
        assert_same_weights(gathered_weights(model), whole_weights(plain))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_a_whole_state_dict_saves_and_loads_into_a_plain_model(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        _train(model, rank, num_ranks)
        file = io.BytesIO()
        with onecopy.gathered(model):
            torch.save(model.state_dict(), file)
            expected = whole_weights(model)
        plain = Stack()
        plain.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert_same_weights(whole_weights(plain), expected, atol=0)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_a_state_dict_of_other_shapes_is_refused_as_torch_does(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
            model.load_state_dict(Stack(width=12).state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})

    yield On(2, run)


@every_stage
@pytest.mark.parametrize("fused", [True, False])
@one_fork
def test_an_optimizers_state_dict_round_trip(fused: bool, stage: int, num_ranks: int) -> Forked:
    """Two steps, state taken over by a new optimizer, two more: four steps of one optimizer on a plain model."""

    def run(rank: int) -> None:
        plain, model = stack(), onecopy.shard(stack(), stage)
        first = AdamW(model.parameters(), lr=1e-2, fused=fused)
        train(model, first, [part(batch, rank, num_ranks) for batch in vector_batches(4)[:2]])
        second = AdamW(model.parameters(), lr=5.0, fused=fused)
        second.load_state_dict(first.state_dict())
        train(model, second, [part(batch, rank, num_ranks) for batch in vector_batches(4)[2:]])
        train(plain, AdamW(plain.parameters(), lr=1e-2, fused=fused), vector_batches(4))
        assert_same_weights(gathered_weights(model), whole_weights(plain))

    yield On(num_ranks, run)
