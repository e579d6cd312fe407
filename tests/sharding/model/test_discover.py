"""Which modules `units="auto"` takes. Each expected list is written by hand, from what the model is made of."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from onecopy.sharding.model import discover
from onecopy.sharding.model.discover import find_parameters, find_scopes, leave_small_to_root


class Block(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: object) -> object:
        return self.body(x)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def flat() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 7, groups=4), nn.LayerNorm(4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))


def bottleneck() -> Block:
    return Block(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def model(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


MODELS = {
    "blocks in a list": (
        model(blocks=nn.ModuleList([bottleneck(), bottleneck()]), norm=nn.BatchNorm2d(4)),
        ["", "blocks.0", "blocks.1"],
    ),
    "stages of blocks, as in a ResNet": (
        model(stages=nn.ModuleList([nn.Sequential(bottleneck(), bottleneck()) for _ in range(2)])),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "blocks of convolutions with their norms": (
        model(stages=nn.ModuleList([nn.Sequential(Block(convolution(), convolution())) for _ in range(2)])),
        ["stages.0", "stages.1"],
    ),
    "stages that do something beside, as in a Swin": (
        model(stages=nn.ModuleList([Block(bottleneck(), bottleneck(), nn.Conv2d(4, 2, 1)) for _ in range(2)])),
        ["stages.0", "stages.0.body.0", "stages.0.body.1", "stages.1", "stages.1.body.0", "stages.1.body.1"],
    ),
    "a plain stack of layers": (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        ["0", "2"],
    ),
    "stages of flat blocks, as in a ConvNeXt": (
        model(stages=nn.ModuleList([nn.Sequential(flat(), flat()), nn.Sequential(flat(), flat())])),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "blocks, and a large table": (
        model(table=nn.Embedding(100, 4), blocks=nn.ModuleList([bottleneck(), bottleneck()])),
        ["table", "blocks.0", "blocks.1"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_units_and_their_layers_are_not(name: str) -> None:
    module, expected = MODELS[name]
    assert list(find_parameters(module, find_scopes(module, "auto"))) == expected


class Adapted(nn.Module):
    """A frozen layer of 4 MB, and an adapter of 64 kB that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1024, 1024).requires_grad_(False)
        self.down, self.up = nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


SMALL = {
    "a narrow net": (model(blocks=nn.ModuleList(nn.Linear(32, 32) for _ in range(8))), [""]),
    "adapters": (
        model(blocks=nn.ModuleList(Adapted() for _ in range(3))),
        ["", "blocks.0", "blocks.1", "blocks.2"],
    ),
    "blocks worth a message": (
        model(blocks=nn.ModuleList(nn.Linear(512, 512) for _ in range(2))),
        ["blocks.0", "blocks.1"],
    ),
    "many small ones, more than the root may take": (
        model(blocks=nn.ModuleList(nn.Linear(200, 200) for _ in range(110))),
        [f"blocks.{number}" for number in range(110)],
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_not_worth_a_message_is_left_to_the_root(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 256 KiB are worth one, and the root takes 16 MiB."""
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)
    module, expected = SMALL[name]
    found = leave_small_to_root(find_parameters(module, find_scopes(module, "auto")))
    assert list(found) == expected
    names = [item.name for items in found.values() for item in items]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    if name == "adapters":
        assert {item.name.split(".")[-2] for item in found[""]} == {"down", "up"}


def test_units_are_named_by_class_or_by_module() -> None:
    """The name of a class means all of its modules, as `units="GPT2Block"` in a config does."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert find_scopes(module, ["Linear"]) == ["", "0", "2"]
    assert find_scopes(module, ["2"]) == ["", "2"]
    assert find_scopes(module, []) == [""]
