"""Messages: values from rank to rank of a group, within its time limit. Who does not answer, or has gone, is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.backends import time_limit
from onecopy.comm.objects import bytes_of
from onecopy.errors import CollectiveError, CollectiveTimeout

# Far from the small tags of a user's own messages, and below those of the mesh.
_SIZES: Final = (1 << 24) - 16
_VALUES: Final = _SIZES + 1
"""Tags of messages: how many bytes a value has, and these bytes."""

_A_LOOK: Final = timedelta(milliseconds=10)


def swap(group: dist.ProcessGroup, given: Mapping[int, Any], sources: Iterable[int]) -> dict[int, Any]:
    """Send each rank of ``given`` its value, and return what each of ``sources`` sends.

    Raises:
        CollectiveTimeout: if a rank does not answer within the group's time limit.
        CollectiveError: if one has gone.
    """
    packed = {id(value): pickle.dumps(value) for value in given.values()}
    sent = {rank: torch.frombuffer(bytearray(packed[id(value)]), dtype=torch.uint8) for rank, value in given.items()}
    sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in sources}
    _deliver(group, {rank: torch.tensor([content.numel()]) for rank, content in sent.items()}, sizes, _SIZES)
    received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
    _deliver(group, sent, received, _VALUES)
    return {rank: pickle.loads(bytes_of(content)) for rank, content in received.items()}


def _deliver(group: dist.ProcessGroup, sent: Mapping[int, Tensor], places: Mapping[int, Tensor], tag: int) -> None:
    start, limit = monotonic(), time_limit(group)
    lost: dict[int, str] = {}

    def attempt(rank: int, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except RuntimeError as error:
            lost[rank] = str(error)

    posted = [
        (rank, attempt(rank, partial(dist.irecv, place, group=group, group_src=rank, tag=tag)))
        for rank, place in places.items()
    ] + [
        (rank, attempt(rank, partial(dist.isend, content, group=group, group_dst=rank, tag=tag)))
        for rank, content in sent.items()
    ]
    for rank, work in posted:
        if rank not in lost:
            # Those after the first that is missing had as long: have a look whether they are missing too.
            left = _A_LOOK if lost else max(_A_LOOK, limit - timedelta(seconds=monotonic() - start))
            attempt(rank, partial(work.wait, left))
    if lost:
        raise _failure(group.rank(), lost, monotonic() - start)


def _failure(own: int, lost: Mapping[int, str], seconds: float) -> CollectiveError:
    who = f"rank{'s' * (len(lost) != 1)} {', '.join(map(str, sorted(lost)))}"
    untouched = "Checkpoints saved before are untouched."
    if all("imed out" in text or "imeout" in text for text in lost.values()):
        return CollectiveTimeout(
            f"rank {own} had no answer from {who} within {seconds:.1f} s while a checkpoint was saved or loaded: look "
            f"there for an error or a disk that hangs, or raise the process group's timeout. {untouched}"
        )
    return CollectiveError(
        f"rank {own} lost {who} while a checkpoint was saved or loaded; the output of {who} says why. {untouched}"
    )
