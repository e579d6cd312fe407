"""Experts: a mixture's weights that files hold one by one, and that a model of transformers 5 holds in one tensor.

    files                                             model, shape
    experts.{e}.gate_proj.weight  (I, H), or w1       experts.gate_up_proj  (E, 2I, H): row e is gate over up
    experts.{e}.up_proj.weight    (I, H), or w3
    experts.{e}.down_proj.weight  (H, I), or w2       experts.down_proj     (E, H, I)

Each file's tensor lies in one piece in the model's, so a rank reads of it what its slice holds, and nothing else.
The names and the order were read in transformers 5.24 (`conversion_mapping.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing

_ONE: Final = re.compile(r"(.*\bexperts\.)(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PLAIN: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_RENAMED: Final = (".block_sparse_moe.", ".mlp.")
"""What Mixtral's files call a block, and what its model does."""


@dataclass(frozen=True)
class Piece:
    """Where one tensor of the files lies in a model's.

    Attributes:
        name: of the model's tensor.
        shape: of the piece.
        start: its first element in the model's tensor, flattened.
    """

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of ``tensor``, the model's own or a rank's slice of it; they share memory."""
        if not isinstance(tensor, SlicedTensor):
            return tensor.detach().view(-1)[self.start : self.stop].view(self.shape)
        held = tensor.slicing
        first = min(max(held.start, self.start), self.stop)
        last = max(min(held.start + held.numel, self.stop), first)
        strides = torch.empty(self.shape, device="meta").stride()
        slicing = Slicing(held.name, self.shape, strides, first - self.start, last - first, held.axis)
        inside = max(first - held.start, 0)
        return tensor.part(inside, last - first, slicing)


def rename(key: str) -> str:
    """What a model of transformers 5 calls a tensor of older files."""
    return key.replace(*_RENAMED)


def find_piece(names: Iterable[str], tensors: Mapping[str, Tensor]) -> Piece | None:
    """Where one expert's weight lies in the model's fused tensors; None if it is none, or they are not fused.

    Whether its shape fits is for the caller to compare.

    Args:
        names: what the weight may be called.
    """
    for name in names:
        if match := _ONE.fullmatch(name):
            kind = _PLAIN.get(match[3], match[3])
            if piece := _place(match[1], int(match[2]), kind, tensors):
                return piece
    return None


def _place(prefix: str, expert: int, kind: str, tensors: Mapping[str, Tensor]) -> Piece | None:
    for name, part, parts in (
        (f"{prefix}{kind}", 0, 1),
        (f"{prefix}gate_up_proj", {"gate_proj": 0, "up_proj": 1}.get(kind, -1), 2),
    ):
        fused = tensors.get(name)
        if fused is None or fused.dim() != 3 or part < 0 or fused.shape[1] % parts or expert >= fused.shape[0]:
            continue
        if tuple(fused.stride()) != torch.empty(fused.shape, device="meta").stride():
            continue
        if isinstance(fused, SlicedTensor) and fused.slicing.spec is not None:
            continue
        shape = torch.Size((fused.shape[1] // parts, fused.shape[2]))
        return Piece(name, shape, (expert * parts + part) * shape.numel())
    return None


def missing_pieces(pieces: Iterable[Piece], tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of fused tensors of which some expert is in no file."""
    covered: dict[str, int] = {}
    for piece in pieces:
        covered[piece.name] = covered.get(piece.name, 0) + piece.shape.numel()
    return {name for name, numel in covered.items() if numel != tensors[name].numel()}
