"""torch.save of sliced state dicts, one file for each rank. Oracle: the run that was never interrupted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import every_stage


def _save(rank: int, num_ranks: int, stage: int, folder: Path) -> None:
    model = onecopy.shard(seeded(Stack), stage)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, [part(batch, rank, num_ranks) for batch in vector_batches(4)[:2]])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(state, folder / f"{rank}.pt")


@every_stage
@pytest.mark.parametrize("weights_only", [True, False])
@one_fork
def test_each_ranks_file_goes_on_as_if_nothing_had_been(
    weights_only: bool, stage: int, num_ranks: int, tmp_path: Path
) -> Forked:
    """Also the size of a file: this rank's elements, not the memory of the whole bucket behind each."""

    def go_on(rank: int) -> None:
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=weights_only)
        model = onecopy.shard(Stack(), stage)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run = train(model, optimizer, [part(batch, rank, num_ranks) for batch in vector_batches(4)[2:]])
        twin = seeded(Stack)
        expected = train(twin, AdamW(twin.parameters(), lr=1e-2), vector_batches(4))
        assert run.norms == pytest.approx(expected.norms[2:], rel=1e-5)
        assert_same_weights(gathered_weights(model), whole_weights(twin), atol=1e-5)
        held = sum(p.local.nbytes for p in model.parameters() if isinstance(p, onecopy.SlicedTensor))
        # Parameters and two states; beside them a few hundred bytes for each of 14 tensors.
        assert (tmp_path / f"{rank}.pt").stat().st_size < 3 * held + 3 * 14 * 1200

    yield On(num_ranks, _save, num_ranks, stage, tmp_path)
    yield On(num_ranks, go_on)


@one_fork
def test_another_ranks_and_another_worlds_file_is_refused(tmp_path: Path) -> Forked:
    """By load_state_dict of the model, and by the first step with the optimizer's states."""
    yield On(2, _save, 2, 3, tmp_path)

    def other_rank(rank: int) -> None:
        state = torch.load(tmp_path / f"{1 - rank}.pt")
        model = onecopy.shard(seeded(Stack), 3)
        with pytest.raises(RuntimeError, match=rf"saved by rank {1 - rank} of 2 .* held by rank {rank} of 2"):
            model.load_state_dict(state["model"])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(state["optimizer"])
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        with pytest.raises(UsageError, match=rf"saved by rank {1 - rank} of 2"):
            optimizer.step()
        assert_same_weights(gathered_weights(model), whole_weights(seeded(Stack)), atol=0)

    def other_world(rank: int) -> None:
        state = torch.load(tmp_path / f"{rank % 2}.pt")
        with pytest.raises(RuntimeError, match=rf"saved by rank {rank % 2} of 2 .* held by rank {rank} of 3"):
            onecopy.shard(seeded(Stack), 3).load_state_dict(state["model"])

    def plain(rank: int) -> None:
        state = torch.load(tmp_path / "0.pt")
        with pytest.raises(RuntimeError, match=r"onecopy\.gathered|onecopy\.save"):
            Stack().load_state_dict(state["model"])
        with pytest.raises(UsageError, match=r"file of rank 0 of 2.*load_state_dict"):
            state["model"]["head.weight"].sum()

    yield On(2, other_rank)
    yield On(3, other_world)
    yield On(1, plain, group=False)


@one_fork
def test_a_model_is_not_pickled_and_says_what_is(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3)
        with pytest.raises(UsageError, match=r"torch\.save\(model\).*model\.state_dict\(\).*onecopy\.save"):
            torch.save(model, tmp_path / f"{rank}.pt")
        weight: Any = model.head.weight.detach()
        alias: Any = copy.copy(weight)
        alias.zero_()
        assert weight.abs().max().item() == 0.0

    yield On(2, run)


@one_fork
def test_a_gradient_held_in_bf16_is_saved_wide(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3, precision="bf16-lean")
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        gradient: Any = model.head.weight.grad
        torch.save(gradient, tmp_path / f"{rank}.pt")
        loaded: Any = torch.load(tmp_path / f"{rank}.pt")
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded.local, gradient.local.float())
        fresh: Tensor = torch.zeros_like(model.head.weight)
        fresh.copy_(loaded)
        assert torch.equal(fresh, gradient.clone())

    yield On(2, run)
