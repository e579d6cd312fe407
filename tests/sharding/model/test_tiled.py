"""Tiled linear layers. Oracle: the layer as it was, in one process of plain PyTorch; the bytes of its tiles."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from onecopy.errors import SettingsError, UsageError
from onecopy.sharding.setup.api import engine_of
from ranks import run_ranks

WIDTH, OUTPUTS, TILES = 64, 513, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.wide: nn.Module = nn.Linear(WIDTH, OUTPUTS)
        self.back = nn.Linear(OUTPUTS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.wide(torch.tanh(self.first(x))))).square().mean()


def _plain() -> Any:
    torch.manual_seed(0)
    return Net()


def _tiled() -> Any:
    model = _plain()
    model.wide = onecopy.tiled(model.wide, TILES)
    return model


def _losses(model: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.5)
    found = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("num_ranks, offload", [(1, False), (2, False), (1, True), (2, True)])
def test_training_is_that_of_the_whole_layer_and_two_tiles_are_whole_at_most(
    num_ranks: int, offload: bool, tmp_path: Path
) -> None:
    batches = list(torch.randn(3, 12, WIDTH, generator=torch.Generator().manual_seed(1)))

    def run(rank: int) -> None:
        expected = _losses(_plain(), batches)
        where = onecopy.Offload(tmp_path, tmp_path) if offload else None
        model = onecopy.shard(_tiled(), 3, units=[nn.Linear], offload=where)
        # Every rank has all rows, so that the mean over ranks is one process's.
        assert _losses(model, batches) == pytest.approx(expected, rel=1e-5)
        if num_ranks == 1 and not offload:
            return
        tile = 4 * (WIDTH + 1) * (OUTPUTS // TILES + 1)
        neighbour = 4 * WIDTH * (WIDTH + 1)
        highest = max(peak["parameters_gathered"] for peak in onecopy.meter(model).peaks.values())
        padding = 4 * 8 * 4 * num_ranks
        assert highest <= tile + max(tile, neighbour) + padding
        assert highest < 4 * WIDTH * OUTPUTS / 3

    run_ranks(num_ranks, run)


def test_tiles_are_units_whatever_units_says() -> None:
    def run(_: int) -> list[str]:
        model = _tiled()
        onecopy.shard(model, 3, units=["back"])
        return [unit.name for unit in engine_of(model).units]

    (names,) = run_ranks(1, run, group=False)
    assert [name for name in names if name] == [*(f"wide.tiles.{number}" for number in range(TILES)), "back"]


def test_a_whole_layers_state_dict_loads() -> None:
    plain, model = _plain(), _tiled()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    x = torch.randn(5, WIDTH)
    assert torch.allclose(model.wide(x), plain.wide(x), atol=1e-5)
    assert torch.equal(torch.cat([tile.weight for tile in model.wide.tiles]), plain.wide.weight)
    assert len(model.state_dict()) == 2 * TILES + 4


def test_what_cannot_be_cut_is_refused() -> None:
    for tiles in (1, 0, True, 4, "2"):
        with pytest.raises(SettingsError, match="from 2 to 3"):
            onecopy.tiled(nn.Linear(2, 3), tiles)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="found Conv1d"):
        onecopy.tiled(nn.Conv1d(1, 1, 1), 2)  # type: ignore[arg-type]

    def run(_: int) -> None:
        model = onecopy.shard(nn.Sequential(nn.Linear(4, 4)), 3)
        with pytest.raises(UsageError, match=r"before onecopy\.shard"):
            onecopy.tiled(model[0], 2)

    run_ranks(1, run, group=False)
