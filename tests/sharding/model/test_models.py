"""Parameters of every odd kind train as in one process: tied, frozen, unused, tiny, transposed, of mixed dtypes.

The oracle is the whole-batch twin of `oracle.py`. Each test runs every stage on two ranks and stages 1 to 3 on three.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import onecopy
from models import VOCAB, Stack, TinyGPT, seeded, token_batches, vector_batches
from odd_models import Convolutions, Mixed, Odd, Reused, TiedAcross, TiedInside, TinyOnly, Transposed
from one_fork import Forked, On, one_fork
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.model import discover
from oracle import (
    OPTIMIZERS,
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    train,
    train_in_rank_order,
)
from ranks import everywhere


def _images(count: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(12, 3, 5, 5, generator=generator), torch.randn(12, 2, generator=generator)) for _ in range(count)
    ]


@everywhere
@pytest.mark.parametrize("kind", [TiedInside, Odd, TinyOnly, Transposed, Reused])
@one_fork
def test_vector_model_trains_like_twin(kind: type[nn.Module], stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        assert_trains_like_twin(rank, num_ranks, lambda: seeded(kind), vector_batches(4), stage=stage)

    yield On(num_ranks, run)


@pytest.mark.parametrize("num_ranks, group", [(1, False), (1, True), (4, True)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_vector_models_train_like_twin_on_one_rank_and_on_four(stage: int, num_ranks: int, group: bool) -> Forked:
    def run(rank: int) -> None:
        for kind in (TiedInside, Odd, TinyOnly, Transposed, Reused, Mixed):
            assert_trains_like_twin(rank, num_ranks, lambda kind=kind: seeded(kind), vector_batches(2), stage=stage)

    yield On(num_ranks, run, group=group)


@everywhere
@one_fork
def test_weight_tied_across_units_trains_like_twin(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model = assert_trains_like_twin(
            rank, num_ranks, lambda: seeded(TiedAcross), token_batches(4), stage=stage, units=[nn.Embedding, nn.Linear]
        )
        assert model.head.weight is model.tokens.weight

    yield On(num_ranks, run)


@one_fork
def test_weight_tied_across_units_updates_its_last_rows_on_four_ranks() -> Forked:
    """29 rows on 4 ranks; a peer's fault was that the last rank's rows never moved."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 3)
        before = gathered_weights(model)["tokens.weight"]
        every_token = [(torch.arange(VOCAB)[None, :7].expand(3, 7) + 11 * torch.arange(3)[:, None],)]
        train(model, OPTIMIZERS["sgd"](model.parameters()), [(t % VOCAB,) for (t,) in every_token])
        moved = (gathered_weights(model)["tokens.weight"] != before).any(dim=1)
        assert moved.all()

    yield On(4, run)


@everywhere
@one_fork
def test_channels_last_weights_train_like_twin(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model = assert_trains_like_twin(rank, num_ranks, lambda: seeded(Convolutions), _images(3), stage=stage)
        with onecopy.gathered(model):
            assert model.blocks[0].weight.is_contiguous(memory_format=torch.channels_last)

    yield On(num_ranks, run)


@everywhere
@one_fork
def test_mixed_dtypes_in_one_block_train_like_twin(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> None:
        model = assert_trains_like_twin(rank, num_ranks, lambda: seeded(Mixed), vector_batches(3), stage=stage)
        assert {p.dtype for p in model.parameters()} == {torch.float64, torch.float32, torch.int64}

    yield On(num_ranks, run)


@everywhere
@one_fork
def test_unused_parameters_keep_no_gradient_and_are_not_decayed(stage: int, num_ranks: int) -> Forked:
    """As in one process: AdamW skips what has no gradient, so its weight decay must not touch it. A whole block too."""

    def make() -> nn.Module:
        model = Stack()
        model.blocks[1].spare = nn.Parameter(torch.ones(5))
        model.spare_block = nn.Linear(40, 40)
        return model

    def build() -> nn.Module:
        return seeded(make)

    def run(rank: int) -> None:
        decaying = lambda parameters: AdamW(parameters, lr=1e-2, weight_decay=0.5)  # noqa: E731
        model = assert_trains_like_twin(rank, num_ranks, build, vector_batches(3), stage=stage, optimizer=decaying)
        model(*part(vector_batches(1)[0], rank, num_ranks)).backward()
        assert {n for n, p in model.named_parameters() if p.grad is None} == {
            "blocks.1.spare",
            "spare_block.weight",
            "spare_block.bias",
        }

    yield On(num_ranks, run)


@everywhere
@pytest.mark.parametrize("frozen", ["first block", "all but biases", "everything but the head"])
@one_fork
def test_frozen_parameters_train_like_twin(frozen: str, stage: int, num_ranks: int) -> Forked:
    """Frozen weights are still needed for the gradients of inputs after all trainable ones have arrived."""

    def freezes(name: str) -> bool:
        if frozen == "first block":
            return name.startswith("blocks.0.")
        return not name.endswith("bias") if frozen == "all but biases" else not name.startswith("head")

    def build() -> nn.Module:
        model = seeded(Stack)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freezes(name))
        return model

    def run(rank: int) -> None:
        model = assert_trains_like_twin(rank, num_ranks, build, vector_batches(3), stage=stage)
        model(*part(vector_batches(1)[0], rank, num_ranks)).backward()
        assert all((p.grad is None) == freezes(n) for n, p in model.named_parameters())

    yield On(num_ranks, run)


@everywhere
@one_fork
def test_frozen_parameters_send_no_gradient(stage: int, num_ranks: int) -> Forked:
    """Only the head's gradient travels: closed form from its own padded size."""

    def run(rank: int) -> tuple[int, int]:
        model = seeded(Stack)
        model.blocks.requires_grad_(False)
        onecopy.shard(model, stage, units=[nn.Sequential])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, num_ranks) for batch in vector_batches(2)])
        sent = onecopy.ledger(model).last_step
        assert sent is not None
        head = onecopy.shard(seeded(nn.Linear, 10, 3), stage)
        return sent.bytes_sent("reduce_scatter") + sent.bytes_sent("all_reduce"), onecopy.padded_numel(head)

    for sent, padded in (yield On(num_ranks, run)):
        factor = 2 if stage == 0 else 1
        assert sent == factor * 4 * padded * (num_ranks - 1) // num_ranks


class LowRank(nn.Module):
    """LoRA: a frozen bf16 base and fp32 adapters, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(10, 10).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, 10) / 3)
        self.up = nn.Parameter(torch.zeros(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + x @ self.down.t() @ self.up.t())


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LowRank() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


@everywhere
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@one_fork
def test_fp32_lora_on_bf16_base_in_one_unit_trains_like_twin(optimizer: str, stage: int, num_ranks: int) -> Forked:
    """Against the rank-ordered twin: the rounding of a bf16 matmul depends on how many rows it has."""

    def run(rank: int) -> None:
        batches = vector_batches(4)
        twin = train_in_rank_order(seeded(Adapted), OPTIMIZERS[optimizer], batches, num_ranks)
        model = onecopy.shard(seeded(Adapted), stage)
        made = OPTIMIZERS[optimizer](model.parameters())
        train(model, made, [part(batch, rank, num_ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), twin.weights)
        base = [p for name, p in model.named_parameters() if "base" in name]
        assert all(p.dtype == torch.bfloat16 and p.grad is None for p in base)

    yield On(num_ranks, run)


@one_fork
def test_ranks_that_built_other_values_take_the_first_ranks() -> Forked:
    """As DDP does."""

    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(rank)
        model = Stack()
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        return own, gathered_weights(onecopy.shard(model, 3))

    (first, found), (other, found_too), _ = yield On(3, run)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert_same_weights(found, first, atol=0)
    assert_same_weights(found_too, first, atol=0)


@everywhere
@one_fork
def test_small_blocks_and_adapters_left_to_the_root_train_like_twin(stage: int, num_ranks: int) -> Forked:
    def run(rank: int) -> list[list[str]]:
        units = []
        with mock.patch.object(discover, "SMALL_BYTES", 2**18):
            for kind in (Stack, Reused):
                batches = vector_batches(2)
                model = assert_trains_like_twin(rank, num_ranks, lambda kind=kind: seeded(kind), batches, stage=stage)
                engine = find_engine(model)
                assert engine is not None
                units.append([unit.name for unit in engine.units if unit.buckets])
        return units

    assert (yield On(num_ranks, run)) == [[[""], [""]]] * num_ranks
