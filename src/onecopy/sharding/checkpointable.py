"""What torch.distributed.checkpoint asks a SlicedTensor: which boxes of the whole tensor it holds, and each of them.

So a checkpoint knows a parameter by its full shape, whatever cut it, and any number of ranks can read it. The protocol
(`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`) is that of DTensor; read in torch 2.13,
where `torch.distributed._checkpointable` spells it out. tests/test_private_apis.py fails clearly when it moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecopy.sharding.boxes import Box, find_boxes

if TYPE_CHECKING:
    from onecopy.sharding.sliced import SlicedTensor, Slicing


def boxes_of(slicing: Slicing) -> list[Box]:
    """The boxes that a slice holds, in the dimensions' own order; `Box.start` counts in memory order.

    Of a parameter that is cut over a tensor axis too, `Box.start` counts in this rank's part. A parameter without
    elements is one empty box, the same on every rank.
    """
    if 0 in slicing.shape:
        return [Box((0,) * len(slicing.shape), tuple(slicing.shape), 0)]
    first, sizes = ((0,) * len(slicing.shape), slicing.shape) if slicing.spec is None else slicing.spec.part
    order = slicing.memory_order
    inverse = [order.index(dim) for dim in range(len(order))]
    return [
        Box(
            tuple(start + box.offsets[i] for start, i in zip(first, inverse, strict=True)),
            tuple(box.sizes[i] for i in inverse),
            box.start,
        )
        for box in find_boxes([sizes[dim] for dim in order], slicing.start, slicing.numel)
    ]


def view_box(tensor: SlicedTensor, box: Box) -> Tensor:
    """The elements of one of the slice's own boxes, with the box's sizes; a view of the slice."""
    order = tensor.slicing.memory_order
    begin = box.start - tensor.slicing.start if box.numel else 0
    run = tensor.local[begin : begin + box.numel].view([box.sizes[dim] for dim in order])
    return run.permute([order.index(dim) for dim in range(len(order))])


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


def find_box(tensor: SlicedTensor, offsets: torch.Size | None) -> Tensor:
    """The elements of the box that begins at ``offsets``; a view of the slice."""
    for box in boxes_of(tensor.slicing):
        if box.offsets == tuple(offsets or ()):
            return view_box(tensor, box)
    raise ValueError(f"this rank holds no part of {tensor.slicing.name!r} that begins at {offsets}")
