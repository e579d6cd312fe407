"""Runs of elements as boxes, and torch.distributed.checkpoint on SlicedTensors. Oracles: torch.arange, and DCP."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.sharding.tensor.boxes import find_boxes
from oracle import assert_same_weights, gathered_weights, mean_over_ranks, part, train, whole_weights
from ranks import everywhere


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(0, prod(shape) - start))


@given(runs())
def test_boxes_tile_the_run_in_order_with_at_most_2n_minus_1_of_them(run: tuple[list[int], int, int]) -> None:
    """Oracle: the elements of torch.arange at the boxes' places, one after the other, are the run."""
    shape, start, numel = run
    whole = torch.arange(prod(shape)).view(shape)
    boxes = find_boxes(shape, start, numel)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    found: list[int] = []
    for box in boxes:
        assert box.start == start + len(found)
        found += whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten().tolist()
    assert found == list(range(start, start + numel))


class Odd(nn.Module):
    """Parameters of every awkward kind: 0-dim, empty, transposed, channels_last, 4-dim, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.scalar = parameter()
        self.empty = parameter(0, 3)
        self.transposed = nn.Parameter(torch.randn(7, 5, generator=generator).t())
        self.image = nn.Parameter(torch.randn(3, 2, 3, 5, generator=generator).to(memory_format=torch.channels_last))
        self.deep = parameter(3, 4, 5, 2)
        self.narrow = parameter(11, dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        return sum((p.float().sum() for p in self.parameters()), torch.zeros(()))


def _round_trip(rank: int, stage: int, folder: str) -> None:
    model = onecopy.shard(Odd(), stage)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = Odd()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    onecopy.shard(other, stage)
    # A forward first: what was gathered must not outlive the load.
    other()
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
    assert other().item() == Odd()().item()
    assert_same_weights(gathered_weights(other), whole_weights(Odd()), atol=0)


@everywhere
@one_fork
def test_plain_dcp_saves_and_loads_a_sharded_model(stage: int, num_ranks: int, tmp_path: Path) -> Forked:
    """Oracle: the weights as built. The metadata has the parameters' own shapes, and every element once."""
    yield On(num_ranks, _round_trip, stage, str(tmp_path / "c"))
    metadata: Any = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    for name, parameter in Odd().named_parameters():
        found = metadata.state_dict_metadata[f"model.{name}"]
        assert (found.size, found.properties.dtype) == (parameter.shape, parameter.dtype)
        assert sum(prod(chunk.sizes) for chunk in found.chunks) == parameter.numel()


def _save_trained(rank: int, num_ranks: int, stage: int, folder: str) -> dict[str, Tensor]:
    model = onecopy.shard(seeded(TinyGPT), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in token_batches(2):
        model(*part(batch, rank, num_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return gathered_weights(model)


def _load_plain(rank: int, folder: str) -> dict[str, Tensor]:
    model = TinyGPT()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return whole_weights(model)


@one_fork
def test_plain_torch_reads_what_plain_dcp_saved_of_a_sharded_model_and_its_optimizer(tmp_path: Path) -> Forked:
    folder = str(tmp_path / "c")
    expected = (yield On(3, _save_trained, 3, 3, folder))[0]
    assert_same_weights((yield On(1, _load_plain, folder, group=False))[0], expected, atol=0)
    metadata: Any = dcp.FileSystemReader(folder).read_metadata()
    # The optimizer's own numbering; parameter 0 is the embedding.
    assert metadata.state_dict_metadata["optimizer.state.0.exp_avg"].size == torch.Size([29, 12])


def _fully_shard_job(rank: int, folder: str) -> None:
    model = seeded(TinyGPT)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in token_batches(2):
        model(*part(batch, rank, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    own, states = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": states}, checkpoint_id=folder)


def _go_on(rank: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model = onecopy.shard(TinyGPT(), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own, states = get_state_dict(model, optimizer)
    dcp.load({"model": own, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)
    run = train(model, optimizer, [part(batch, rank, 3) for batch in token_batches(4)[2:]])
    return mean_over_ranks(run.losses), gathered_weights(model)


def _whole_batches(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(TinyGPT)
    run = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), token_batches(4))
    return run.losses[2:], whole_weights(model)


@one_fork
def test_torchs_own_functions_bring_fully_shards_checkpoint_into_a_sharded_model(tmp_path: Path) -> Forked:
    """get_state_dict, dcp.load and set_state_dict, without onecopy.load. Oracle: whole batches in one process."""
    yield On(2, _fully_shard_job, str(tmp_path))
    losses, weights = (yield On(1, _whole_batches, group=False))[0]
    for found_losses, found in (yield On(3, _go_on, str(tmp_path))):
        assert found_losses == pytest.approx(losses, rel=1e-6, abs=0)
        assert_same_weights(found, weights, atol=2e-6)
