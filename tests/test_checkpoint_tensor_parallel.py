"""Checkpoints of models that are cut over a tensor axis too: saved at two by two ranks, loaded there and elsewhere.

Oracle: the whole parameters and states themselves, taken before the save by DTensor's own `full_tensor`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import seeded
from ranks import run_ranks
from test_tensor_parallel import Gpt, full_weights, mesh_of, parallelize


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
def test_a_tensor_parallel_run_goes_on_where_it_was_saved_and_in_plain_pytorch(stage: int, tmp_path: Path) -> None:
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

    saved, later = run_ranks(4, save)[0]
    for weights in run_ranks(4, go_on):
        for name, expected in later.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    plain = run_ranks(1, load_plain, group=False)[0]
    assert plain.keys() == saved.keys()
    for name, expected in saved.items():
        assert torch.equal(plain[name], expected), name
