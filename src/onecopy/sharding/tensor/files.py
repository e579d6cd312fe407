"""Slices in files: what torch.save writes of a SlicedTensor, and what torch.load makes of it again.

A file holds one rank's elements and says which these are. What is loaded is a SlicedTensor over a `SavedAxis`, a place
in a world that is not there; it may be copied into a tensor that holds the same elements at the same place among as
many ranks, and into no other. So a rank's own file loads, and another rank's or another world's is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from onecopy.errors import UsageError

if TYPE_CHECKING:
    from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


class SavedAxis:
    """The place on the shard axis of whoever saved a slice. Nothing can be sent along it.

    Attributes:
        rank: its place.
        size: how many ranks there were.
    """

    name = "saved"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"this slice was loaded from the file of rank {self.rank} of {self.size} and belongs to no model yet: give "
            f"it to load_state_dict of the sharded model or of its optimizer first."
        )


def reduce_slice(tensor: SlicedTensor) -> tuple[Any, ...]:
    """What pickle keeps, as `rebuild_slice` takes it: the elements, and which these are.

    Raises:
        UsageError: for a parameter, with which a whole module would be pickled, and under tensor parallelism.
    """
    slicing = tensor.slicing
    if isinstance(tensor, torch.nn.Parameter):
        refuse_pickle(slicing.name)
    if slicing.spec is not None:
        raise UsageError(
            f"{slicing.name!r} is sharded and tensor-parallel, which torch.save does not keep: use "
            f"onecopy.save(directory, model, optimizer)."
        )
    # An operation, so that memory of the whole bucket is not written, and that what has no values raises.
    copied: Any = tensor.detach().clone()
    place = (slicing.axis.rank, slicing.axis.size)
    return (
        copied.local,
        slicing.name,
        tuple(slicing.shape),
        tuple(slicing.strides),
        slicing.start,
        slicing.numel,
        place,
    )


def refuse_pickle(name: str) -> NoReturn:
    """Of a sharded model, or a part of it, called ``name``."""
    raise UsageError(
        f"a sharded model can be neither deep-copied nor pickled (torch.save(model)), inside onecopy.gathered either; "
        f"found {name!r}. Save model.state_dict(), each rank to its own file, or whole inside `with "
        f"onecopy.gathered(model):`, or call onecopy.save(directory, model, optimizer). Build another model and give "
        f"it a copy of the whole model.state_dict(). A moving average (AveragedModel, ModelEma) is "
        f"onecopy.ema(model, decay)."
    )


def is_saved(slicing: Slicing) -> bool:
    """Whether the slice came out of a file and belongs to no model yet."""
    return isinstance(slicing.axis, SavedAxis)


def describe_difference(own: Slicing, saved: Slicing) -> str:
    """Why a slice out of a file does not go where another is, in words."""
    return (
        f"{saved.name!r} was saved by rank {saved.axis.rank} of {saved.axis.size} (elements {saved.start} to "
        f"{saved.start + saved.numel}), and {own.name!r} here is held by rank {own.axis.rank} of {own.axis.size} "
        f"(elements {own.start} to {own.start + own.numel}): load each rank's own file, at the number of ranks, the "
        f"stage and the units= that it was saved at. What onecopy.save writes loads at any."
    )
