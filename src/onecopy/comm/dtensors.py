"""DTensors, PyTorch's tensors over a mesh, as onecopy meets them: what is local of them, and how to make them again.

torch.distributed.tensor takes as long to import as the rest of onecopy, and where nobody has imported it there are no
DTensors; so it is looked up and not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(tensor: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the very tensor that it holds; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    found: Any = tensor
    with torch.no_grad():
        local: Tensor = found.to_local()
    return local


def address_of(tensor: Tensor) -> int:
    """Where the memory begins that the local part of ``tensor`` looks at; 0 if it has none of its own.

    The result of a collective that is still under way, which tensor parallelism returns from modules, has none.
    """
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def find_segments(placement: Any, length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Where the part of place ``rank`` out of ``size`` lies along the dimension that ``placement`` cuts.

    Returns:
        First index and length of each piece, in the order in which they lie in the part: one for `Shard`, several for
        the strided one that cuts a fused weight (private: `_StridedShard` with `split_factor`; read in torch 2.13).

    Raises:
        ValueError: for any other placement, and for strided pieces of unequal length.
    """
    split: int = 1 if placement.is_shard() else getattr(placement, "split_factor", 0)
    if split < 1 or (split > 1 and length % (split * size)):
        raise ValueError(f"where elements lie is not known of {length} of them laid out as {placement}")
    each = length // split if split > 1 else length
    width = -(-each // size)
    first = min(rank * width, each)
    return [(part * each + first, min(width, each - first)) for part in range(split)]


def dtensor_from(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, strides: tuple[int, ...]
) -> Tensor:
    """The DTensor of which ``local`` is this rank's part; they share memory."""
    made: Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local, mesh, placements, shape=shape, stride=strides
    )
    return made
