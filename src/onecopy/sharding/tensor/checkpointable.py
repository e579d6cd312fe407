"""What torch.distributed.checkpoint asks a SlicedTensor: which boxes of the whole tensor it holds, and each of them.

So a checkpoint knows a parameter by its full shape, whatever cut it, and any number of ranks can read it. The protocol
(`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`) is that of DTensor; read in torch 2.13,
where `torch.distributed._checkpointable` spells it out. tests/house/test_private_apis.py fails clearly when it moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onecopy.sharding.tensor.boxes import Box, find_boxes

if TYPE_CHECKING:
    from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


class Piece(NamedTuple):
    """A box of the whole parameter that a slice holds, in the dimensions' own order.

    Attributes:
        offsets, sizes: in the whole, in elements.
        run: the box of this rank's part, in memory order, that holds it in one run.
        cut: dimension and first index in ``run``, where the piece is not all of it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    run: Box
    cut: tuple[int, int] | None = None


def boxes_of(slicing: Slicing) -> list[Piece]:
    """What a slice holds. A parameter without elements is one empty piece, the same on every rank."""
    if 0 in slicing.shape:
        return [Piece((0,) * len(slicing.shape), tuple(slicing.shape), Box((), (), 0))]
    order = slicing.memory_order
    inverse = [order.index(dim) for dim in range(len(order))]

    def runs(sizes: Sequence[int]) -> Iterator[Piece]:
        for box in find_boxes([sizes[dim] for dim in order], slicing.start, slicing.numel):
            yield Piece(tuple(box.offsets[i] for i in inverse), tuple(box.sizes[i] for i in inverse), box)

    if slicing.spec is None or not slicing.spec.is_cut:
        return list(runs(slicing.shape))
    dim, segments = slicing.spec.placement.dim, slicing.spec.segments
    part = list(slicing.shape)
    part[dim] = sum(length for _, length in segments)
    return [piece for run in runs(part) for piece in _place(run, dim, segments)]


def _place(run: Piece, dim: int, segments: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Cut a box of a part where its segments along ``dim`` meet, and put each piece where it lies in the whole."""
    begin, end = run.offsets[dim], run.offsets[dim] + run.sizes[dim]
    local = 0
    for first, length in segments:
        start, stop = max(begin, local), min(end, local + length)
        if start < stop:
            offsets, sizes = list(run.offsets), list(run.sizes)
            offsets[dim], sizes[dim] = first + start - local, stop - start
            yield Piece(tuple(offsets), tuple(sizes), run.run, (dim, start - begin))
        local += length


def view_box(tensor: SlicedTensor, piece: Piece) -> Tensor:
    """The elements of one of the slice's own pieces, with its sizes; a view of the slice, a copy where it rests."""
    return shape_run(tensor.elements(first_element(tensor.slicing, piece), piece.run.numel), tensor.slicing, piece)


def first_element(slicing: Slicing, piece: Piece) -> int:
    """Where a piece begins among the slice's own elements."""
    return piece.run.start - slicing.start if piece.run.numel else 0


def shape_run(run: Tensor, slicing: Slicing, piece: Piece) -> Tensor:
    """The 1-D elements of a piece's run, in the sizes of the piece; a view."""
    if 0 in piece.sizes:
        return run[:0].view(piece.sizes)
    order = slicing.memory_order
    run = run.view(piece.run.sizes).permute([order.index(dim) for dim in range(len(order))])
    return run if piece.cut is None else run.narrow(*piece.cut, piece.sizes[piece.cut[0]])


def write_items(tensor: SlicedTensor, name: str) -> list[Any]:
    """What a save plan holds of the slice: one item for each box."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(name, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                properties=properties,
                size=tensor.size(),
            ),
        )
        for box in ([] if tensor.slicing.is_copy else boxes_of(tensor.slicing))
    ]


def chunk_list(tensor: SlicedTensor) -> list[Any]:
    """What a load plan is to fill of the slice: one chunk for each box."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes_of(tensor.slicing)]


def find_piece(tensor: SlicedTensor, offsets: torch.Size | None) -> Piece:
    """The slice's box that begins at ``offsets``."""
    for box in boxes_of(tensor.slicing):
        if box.offsets == tuple(offsets or ()):
            return box
    raise ValueError(f"this rank holds no part of {tensor.slicing.name!r} that begins at {offsets}")
