"""Checkpoints of models that are cut over a tensor axis too: saved at two by two ranks, loaded there and elsewhere.

Oracle: the whole parameters and states themselves, taken before the save by DTensor's own `full_tensor`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import onecopy
from models import seeded
from one_fork import Forked, On, one_fork
from onecopy.comm.mesh import Axis
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
from onecopy.sharding.tensor.checkpointable import boxes_of, view_box
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing
from onecopy.sharding.tensor.tensor_parallel import TensorSpec
from tensor_parallel_models import Gpt, full_weights, mesh_of, parallelize


def _trained(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = mesh_of()
    model = onecopy.shard(parallelize(seeded(Gpt), mesh["tensor"], False), stage, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(24).view(2, 12) % 7
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_a_tensor_parallel_run_goes_on_where_it_was_saved_and_in_plain_pytorch(stage: int, tmp_path: Path) -> Forked:
    def save(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = _trained(stage)
        onecopy.save(tmp_path, model, optimizer)
        saved = full_weights(model)
        _step(model, optimizer)
        return saved, full_weights(model)

    def go_on(rank: int) -> dict[str, Tensor]:
        model, optimizer = _trained(3 - stage)
        _step(model, optimizer)
        onecopy.load(tmp_path, model, optimizer)
        _step(model, optimizer)
        return full_weights(model)

    def load_plain(rank: int) -> dict[str, Tensor]:
        model = Gpt()
        onecopy.load(tmp_path, model)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    saved, later = (yield On(4, save))[0]
    for weights in (yield On(4, go_on)):
        for name, expected in later.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    plain = (yield On(1, load_plain, group=False))[0]
    assert plain.keys() == saved.keys()
    for name, expected in saved.items():
        assert torch.equal(plain[name], expected), name


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), _StridedShard(1, split_factor=3)], ids=str)
def test_pieces_of_all_ranks_are_the_whole(placement: Shard) -> None:
    """Oracle: torch's own cut of a tensor, put together again from what each slice of each part says it holds."""
    whole = torch.arange(10 * 12.0).view(10, 12)
    found = torch.full_like(whole, -1)
    for rank, part in enumerate(placement._split_tensor(whole, 2, with_padding=False)[0]):
        axis = Axis("tensor", None, Staging(), Ledger())
        axis.rank, axis.size = rank, 2
        spec = TensorSpec(None, placement, whole.shape, whole.stride(), axis)  # type: ignore[arg-type]
        flat = part.flatten()
        for start in range(0, flat.numel(), 17):
            local = flat[start : start + 17].clone()
            slicing = Slicing("w", whole.shape, whole.stride(), start, local.numel(), axis, spec)
            tensor = SlicedTensor(local, slicing)
            for piece in boxes_of(slicing):
                where = tuple(
                    slice(first, first + size) for first, size in zip(piece.offsets, piece.sizes, strict=True)
                )
                assert (found[where] == -1).all()
                found[where] = view_box(tensor, piece)
    assert torch.equal(found, whole)
