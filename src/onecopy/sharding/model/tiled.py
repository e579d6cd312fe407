"""Tiled linear layers: one that does not fit when whole is gathered and computed a tile at a time (ZeRO-Infinity).

A tile is a linear layer of some of the outputs, and a unit of its own. At stage 3 no more of the layer is whole than
the tile that computes and those gathered ahead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecopy.errors import SettingsError, UsageError
from onecopy.sharding.tensor.sliced import SlicedTensor


class Tile(nn.Linear):
    """Some of a linear layer's outputs."""


class TiledLinear(nn.Module):
    """A linear layer in tiles; what it computes is the concatenation of what they do.

    Args:
        linear: whose values it takes.
        tiles: how many; the first ones have one output more where they do not divide the outputs evenly.

    Attributes:
        tiles: in the order of the outputs.
    """

    def __init__(self, linear: nn.Linear, tiles: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weights = linear.weight.detach().tensor_split(tiles)
        biases: Any = [None] * tiles if linear.bias is None else linear.bias.detach().tensor_split(tiles)
        self.tiles = nn.ModuleList(_tile(linear, w, b) for w, b in zip(weights, biases, strict=True))
        self.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (..., in_features) to (..., out_features)."""
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def tiled(linear: nn.Linear, tiles: int = 4) -> TiledLinear:
    """Cut a large linear layer into tiles, so that each tile is gathered by itself. Call it before `onecopy.shard`.

    Put the module that it returns in the place of ``linear``. The results are equal up to the rounding of a matrix
    product of another shape; the gradient of the input is a sum over tiles. Memory: the values once more during this
    call. The state dict of the new module has one entry for each tile. It also loads the state dict of ``linear``.

    Args:
        linear: a plain layer of any dtype, whose weight has the shape (outputs, inputs).
        tiles: how many tiles: at least 2, at most the number of outputs.

    Returns:
        A module in the place of ``linear``: input of shape (..., inputs), output of shape (..., outputs).

    Raises:
        SettingsError: if ``linear`` is no `torch.nn.Linear`, or cannot be cut into so many tiles.
        UsageError: if ``linear`` is sharded already.
    """
    if not isinstance(linear, nn.Linear):
        raise SettingsError(f"onecopy.tiled takes a torch.nn.Linear; found {type(linear).__name__}")
    if isinstance(tiles, bool) or not isinstance(tiles, int) or not 2 <= tiles <= linear.out_features:
        raise SettingsError(
            f"tiles must be a whole number from 2 to {linear.out_features}, the outputs of the layer; found {tiles!r}"
        )
    if isinstance(linear.weight, SlicedTensor):
        raise UsageError(
            "onecopy.tiled cuts layers that are not sharded, and this layer is sharded: call it before onecopy.shard."
        )
    return TiledLinear(linear, tiles)


def _tile(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> Tile:
    tile = Tile(linear.in_features, len(weight), bias is not None, device="meta", dtype=weight.dtype)
    tile.weight = nn.Parameter(weight.clone(), linear.weight.requires_grad)
    if bias is not None:
        tile.bias = nn.Parameter(bias.clone(), linear.bias.requires_grad)
    return tile.train(linear.training)


def _cut(module: TiledLinear, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the entries of a whole layer apart."""
    for name in ("weight", "bias"):
        whole = state_dict.pop(prefix + name, None)
        if isinstance(whole, Tensor):
            for number, part in enumerate(whole.tensor_split(len(module.tiles))):
                state_dict[f"{prefix}tiles.{number}.{name}"] = part
