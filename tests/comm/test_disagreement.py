"""Ranks that do not agree, fall behind or die are named, and every process ends; never a hang or a wrong number.

The oracle is the issue's list: which ranks, which collective, which unit, which difference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
import ranks
from models import Stack, seeded, vector_batches
from onecopy.comm import mesh, patience
from onecopy.comm.native_calls import NativeCalls
from onecopy.errors import CollectiveError, CollectiveTimeout, MismatchError, OnecopyError
from oracle import OPTIMIZERS, part
from ranks import RankError, run_ranks
from stack_loops import stack, step
from told import Told


@pytest.fixture(autouse=True, params=["memory", "sockets"])
def _either_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that needs no answer does not wait for one, and what that means differs by transport."""
    monkeypatch.setattr(ranks, "default_transport", request.param)


def _another_shape(rank: int) -> dict[str, Any]:
    return {"model": seeded(Stack, 10, 3) if rank != 1 else seeded(Stack, 12, 3), "stage": 2}


def _more_layers(rank: int) -> dict[str, Any]:
    return {"model": seeded(Stack, 10, 4 if rank == 1 else 3), "stage": 2}


def _frozen(rank: int) -> dict[str, Any]:
    model = stack()
    model.head.requires_grad_(rank != 1)
    return {"model": model, "stage": 2}


def _another_dtype(rank: int) -> dict[str, Any]:
    return {"model": stack().to(torch.float64 if rank == 1 else torch.float32), "stage": 2}


def _but(**settings: Any) -> Callable[[int], dict[str, Any]]:
    """The same model and stage on every rank, but rank 1 with another setting."""
    return lambda rank: {"model": stack(), "stage": 2} | (settings if rank == 1 else {})


@pytest.mark.parametrize(
    "make, words",
    [
        (_another_shape, ["of shape (3, 10)", "of shape (3, 12)", "head.weight", "rank 0", "rank 1"]),
        (_more_layers, ["rank 1"]),
        (_frozen, ["head.weight", "requires_grad", "rank 1"]),
        (_another_dtype, ["float64", "rank 1"]),
        (_but(stage=3), ["stage=2", "stage=3", "rank 1"]),
        (_but(accumulate=2), ["accumulate=2", "rank 1"]),
        (_but(prefetch=2), ["prefetch=2", "rank 1"]),
        (_but(precision="bf16"), ["bfloat16", "rank 1"]),
        (_but(broadcast_buffers=False), ["broadcast_buffers", "rank 1"]),
        (_but(units=[nn.Linear]), ["unit", "rank 1"]),
    ],
    ids=["shape", "layers", "frozen", "dtype", "stage", "accumulate", "prefetch", "precision", "buffers", "units"],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_given_different_things_are_told_the_first_difference(
    make: Callable[[int], dict[str, Any]], words: list[str], num_ranks: int
) -> None:
    """Raised on every rank, at shard(), with the same difference named."""

    def run(rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            onecopy.shard(**make(rank))
        return str(caught.value)

    messages = run_ranks(num_ranks, run)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in words), messages[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_runs_fewer_backwards_is_named_by_the_others(stage: int) -> None:
    """A time-out, not a hang: the others name the collective, its unit and the rank that is missing, and all end."""
    told = Told(3)

    def run(rank: int) -> str:
        model = onecopy.shard(stack(), stage)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step(model, rank, 3, optimizer)
        loss = model(*part(vector_batches(1)[0], rank, 3))
        if rank == 2:
            told.wait_for_others()
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            loss.backward()
        told.tell(rank)
        return str(caught.value)

    start = time.monotonic()
    first, second, _ = run_ranks(3, run, group_timeout=0.8)
    assert time.monotonic() - start < 20
    for message in (first, second):
        assert "all_reduce" in message if stage == 0 else "reduce_scatter" in message or "all_gather" in message
        assert "rank 2" in message
        assert any(unit in message for unit in ("blocks.0", "blocks.1", "blocks.2", "(root)")), message


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_runs_fewer_forwards_is_named_by_the_others(stage: int) -> None:
    told = Told(2)

    def run(rank: int) -> str:
        model = onecopy.shard(stack(), stage)
        step(model, rank, 2)
        if rank == 1:
            told.wait_for_others()
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            model(*part(vector_batches(1)[0], rank, 2)).backward()
        told.tell(rank)
        return str(caught.value)

    message, _ = run_ranks(2, run, group_timeout=0.8)
    assert "reduce_scatter" in message
    assert "rank 1" in message


def test_a_rank_that_dies_is_named_and_no_process_is_left() -> None:
    """The survivors raise at once (gloo sees the closed connection) instead of waiting for the time limit."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), 3)
        step(model, rank, 3)
        # Or it might die before the others are through with the step, which fetch its slices when they like.
        torch.distributed.barrier()
        if rank == 1:
            raise MemoryError("on purpose")
        start = time.monotonic()
        # A survivor that has been told ends too, and may be named beside the first.
        with pytest.raises(OnecopyError, match=r"ranks? [\d, ]*\b1\b"):
            step(model, rank, 3)
        assert time.monotonic() - start < 5

    with pytest.raises(RankError, match=r"^rank 1 failed:(.|\n)*on purpose") as caught:
        run_ranks(3, run)
    assert "rank 0" not in str(caught.value)
    assert "rank 2" not in str(caught.value)


class Looping(nn.Module):
    """Calls a block as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)).square().mean()


def test_a_block_called_in_different_numbers_by_rank_trains_like_its_rank_alone() -> None:
    """Each rank's loss is that of one process on its data, in a first pass and in one after it."""

    def run(rank: int) -> None:
        model, twin = onecopy.shard(seeded(Looping), 3), seeded(Looping)
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            found = model(x, 1 + 2 * rank)
            found.backward()
            assert torch.allclose(found, twin(x, 1 + 2 * rank))

    run_ranks(2, run)


@pytest.mark.parametrize("where", ["backward", "step", "norm"])
def test_a_long_wait_is_logged_once_with_what_and_whom_it_waits_for(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the time limit; the rank goes on when the other one comes."""
    monkeypatch.setattr(patience, "SECONDS", 0.4)
    monkeypatch.setattr(patience, "_A_LOOK", 0.1)

    def run(rank: int) -> list[str]:
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("onecopy").addHandler(handler)
        model = onecopy.shard(stack(), 3)
        optimizer = SGD(model.parameters(), lr=0.1)

        def late(here: str) -> None:
            if rank == 1 and here == where:
                time.sleep(1.2)

        late("backward")
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        late("norm")
        if where == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        late("step")
        optimizer.step()
        return logged

    waited, late = run_ranks(2, run, group_timeout=20)
    assert late == []
    (message,) = waited
    what = {"backward": "reduce_scatter of unit", "step": "barrier", "norm": "norm"}[where]
    assert what in message
    assert "no answer from rank 1" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_gather_apart_by_collectives_are_told(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks cannot fetch, a gather pairs with whatever the others gather: of equal size, without a word."""
    monkeypatch.setattr(mesh, "exchanges_directly", lambda group: False)
    monkeypatch.setattr(mesh, "transport_for", lambda group, device, staging: NativeCalls(staging, averages=False))

    class Swapped(Stack):
        def forward(self, x: Tensor, y: Tensor, route: list[int]) -> Tensor:  # type: ignore[override]
            for block in route:
                x = x + self.blocks[block](x)
            return torch.nn.functional.mse_loss(self.head(x), y)

    def run(rank: int) -> str:
        model = onecopy.shard(seeded(Swapped), stage)
        batch = part(vector_batches(1)[0], rank, 2)
        model(*batch, [0, 1, 2]).backward()
        SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(CollectiveError) as caught:
            model(*batch, [0, 1, 2] if rank else [1, 0, 2]).backward()
        return str(caught.value)

    for message in run_ranks(2, run, group_timeout=10):
        assert "through different units, or in another order" in message
