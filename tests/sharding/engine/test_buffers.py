"""Buffers are equal on all ranks when a model is evaluated or saved, as under DDP; what never changes is not sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import CollectiveError, MismatchError
from oracle import OPTIMIZERS, part
from ranks import every_stage, run_ranks


class Codebook(nn.Module):
    """A vector quantiser: its codes move with what a rank sees, by `.data`, which no version counter notices."""

    def __init__(self, codes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, 3)
        self.register_buffer("codes", torch.randn(codes, 10))
        self.register_buffer("cache", torch.zeros(10), persistent=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("dead", torch.zeros(codes, dtype=torch.bool))
        self.register_buffer("places", torch.arange(4).expand(2, 4), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        nearest = torch.cdist(x, self.codes).argmin(1)
        x = x + (self.codes[nearest] - x).detach() * 0.5 + 0.1 * self.cache
        if self.training:
            hit = F.one_hot(nearest, len(self.codes)).bool().any(0)
            self.codes.data.lerp_(torch.where(hit[:, None], x.detach().mean(0), self.codes), 0.3)
            self.cache = x.detach().mean(0)
            self.calls += 1
            self.dead.copy_(~hit)
        return F.mse_loss(self.head(x), y)


def _train(
    model: nn.Module, core: Codebook, batches: list[Any], rank: int, num_ranks: int, accumulate: int
) -> list[dict[str, Tensor]]:
    """The buffers of this rank as each forward found them, and at last as an evaluation does."""
    seen: list[dict[str, Tensor]] = []
    core.register_forward_pre_hook(lambda *_: seen.append({n: b.clone() for n, b in core.named_buffers()}))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for number, batch in enumerate(batches):
        last = (number + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            model(*part(batch, rank, num_ranks)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if number > 1:
            # Between two steps, and by what each rank has at hand.
            core.codes.data[0] += 0.1 * rank + 0.1
    model.eval()
    with torch.no_grad():
        model(*part(batches[0], rank, num_ranks))
    return seen


@every_stage
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_forward_finds_the_buffers_that_ddps_does(accumulate: int, stage: int, num_ranks: int) -> None:
    """Oracle: DDP at its defaults, whose buffers are the first rank's before each step's first forward."""
    batches = vector_batches(9)

    @torch.no_grad()
    def check(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
        assert len(found) == len(expected) == 10
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, msg=lambda text, at=(number, name): f"{at}: {text}")

    def run(rank: int) -> Tensor:
        twin = seeded(Codebook)
        twin.places = twin.places.clone()  # DDP itself takes no expanded buffer
        expected = _train(DistributedDataParallel(twin), twin, batches, rank, num_ranks, accumulate)
        model = onecopy.shard(seeded(Codebook), stage)
        found = _train(model, model, batches, rank, num_ranks, accumulate)
        # What users write after the last step only a forward for training spreads; DDP's evaluation does too.
        found[-1]["codes"][0] = expected[-1]["codes"][0]
        check(found, expected)
        return expected[-1]["codes"]

    codes = run_ranks(num_ranks, run)
    assert all(torch.equal(codes[0], other) for other in codes[1:])


def _rotary() -> nn.Module:
    """Tables and masks that never change, and as large as codebooks are."""
    model = seeded(Stack)
    model.register_buffer("frequencies", torch.randn(64), persistent=False)
    model.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool).tril())
    return model


@every_stage
@one_fork
def test_buffers_that_never_change_are_not_sent(stage: int, num_ranks: int) -> Forked:
    """Oracle: the ledger counts no byte of them in a step that compares none; equal codes were seen above."""

    def run(rank: int) -> list[int]:
        model = onecopy.shard(_rotary(), stage)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        sent = []
        for batch in vector_batches(4):
            model(*part(batch, rank, num_ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(onecopy.ledger(model).last_step.bytes_sent("broadcast"))
        return sent

    sent = (yield On(num_ranks, run))[0]
    # Exchanges 1 and 2, 3 and 4, 5 and 6, 7 and 8: the second of the third step is the last that compares nothing.
    assert sent[2] == 0
    assert sent[1] == (16 + 64 * 4 + 300 * 300) * (num_ranks - 1)


@one_fork
def test_batch_norm_sends_its_buffers_twice_a_step_in_one_message_each() -> Forked:
    """Oracle: their bytes, by the count of BatchNorm's own documentation: two vectors and one int64."""

    def run(rank: int) -> list[tuple[int, int]]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)) for _ in range(3)))
        onecopy.shard(model, 2)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for batch in vector_batches(3):
            model(part(batch, rank, 2)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [(e.calls, e.bytes_sent) for e in onecopy.ledger(model).last_step.entries if e.op == "broadcast"]

    assert (yield On(2, run))[0] == [(1, 16 + 3 * (2 * 40 + 8)), (1, 16 + 3 * (2 * 40 + 8))]


def test_one_rank_alone_evaluates_a_replicated_model_after_a_step() -> None:
    """Under DDP it would wait for the others, which train on. Oracle: the training that evaluates nowhere."""

    def run(rank: int) -> None:
        found: list[Tensor] = []
        for evaluates in (False, True):
            model = onecopy.shard(seeded(Codebook), 0)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            for batch in vector_batches(3):
                model(*part(batch, rank, 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if evaluates and rank == 1:
                    model.eval()
                    with torch.no_grad():
                        model(*batch)
                    model.train()
            found.append(model.codes.clone())
        assert torch.equal(*found)

    run_ranks(2, run, group_timeout=5)


@one_fork
def test_statistics_that_are_taken_anew_are_equal_in_the_evaluation_that_follows() -> Forked:
    """As `torch.optim.swa_utils.update_bn` does, without a step. Oracle: the first rank's alone, in plain PyTorch."""

    def run(rank: int) -> None:
        batches = vector_batches(3)
        plain, model = seeded(Codebook), onecopy.shard(seeded(Codebook), 2)
        with torch.no_grad():
            for batch in batches:
                plain(*part(batch, 0, 2))
                model(*part(batch, rank, 2))
            assert torch.equal(model.eval()(*batches[0]), plain.eval()(*batches[0]))

    yield On(2, run)


@every_stage
@one_fork
def test_what_is_saved_and_evaluated_between_micro_batches_is_the_first_ranks(stage: int, num_ranks: int) -> Forked:
    """Oracle: the first rank's buffers, exchanged by torch.distributed. No step has made them equal there."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Codebook), stage, accumulate=4)
        batches = [part(batch, rank, num_ranks) for batch in vector_batches(4)]
        ways: list[Callable[[], Any]] = [
            lambda: model.eval()(*batches[0]),
            lambda: onecopy.gathered(model).__enter__(),
        ]
        for way in ways:
            model.train()
            model(*batches[0]).backward()
            with torch.no_grad():
                way()
            first = [{name: buffer.clone() for name, buffer in model.named_buffers()}]
            torch.distributed.broadcast_object_list(first)
            assert all(torch.equal(buffer, first[0][name]) for name, buffer in model.named_buffers())

    yield On(num_ranks, run)


def test_buffers_of_other_shapes_are_left_alone_or_named() -> None:
    """Found before a message of other length: those are not exchanged. Found later: named. Oracle: hand-made shapes."""

    class Growing(Codebook):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.cache = torch.zeros(10 + self.grows)
            x = torch.tanh(self.blocks[0](x))
            return F.mse_loss(self.head(x), y)

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Growing), 2)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for number, batch in enumerate(vector_batches(4)):
            model.grows = rank * number
            model.calls.fill_(7 + rank)
            model(*part(batch, rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.cache.shape == (10 + rank * number,)
            assert model.calls == 7
        model.calls = model.calls.new_zeros(1, 1 + rank)
        with pytest.raises((MismatchError, CollectiveError)):
            model(*part(vector_batches(1)[0], rank, 2))

    run_ranks(2, run, group_timeout=1)
