"""Agreement: before anything is sharded, ranks make sure that they were given the same model and settings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from onecopy.comm.mesh import Mesh
from onecopy.errors import MismatchError, OffloadError

T = TypeVar("T")


def check_agreement(lines: Sequence[str], mesh: Mesh) -> None:
    """Compare a description of the model and its settings over all ranks of the mesh, the tensor axis included.

    Args:
        lines: the description; the first line that differs is named.

    Raises:
        MismatchError: on every rank, if one rank's description differs.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:6]
    own = float(int.from_bytes(digest, "big"))
    for axis in (*mesh.axes, mesh.tensor):
        # Two maxima tell whether all are equal: the largest, and the largest of the negated.
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=axis.control_device)
        if message := axis.combine(extremes, "agree", maximum=True):
            message.finish()
            if extremes[0] != -extremes[1]:
                _name_difference(lines, axis.exchange_objects(list(lines)), axis.ranks)


def _name_difference(own: Sequence[str], all_lines: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    first = all_lines[0]
    for lines, rank in zip(all_lines, ranks, strict=True):
        for expected, found in zip(first, lines, strict=False):
            if expected != found:
                raise MismatchError(
                    f"ranks were given different models or settings: rank {ranks[0]} has {expected}, rank {rank} has "
                    f"{found}. Build the same model with the same arguments on every rank."
                )
        if len(first) != len(lines):
            longer, where = (first, ranks[0]) if len(first) > len(lines) else (lines, rank)
            raise MismatchError(
                f"ranks were given different models: rank {where} also has {longer[min(len(first), len(lines))]}."
            )


def everywhere(make: Callable[[], T], mesh: Mesh) -> T:
    """What ``make`` returns, if it worked on all ranks, each of which calls it.

    Raises:
        OffloadError: on every rank, if it did not on one of them.
    """
    made: list[T] = []
    failed: OffloadError | None = None
    try:
        made.append(make())
    except OffloadError as error:
        failed = error
    axes = (*mesh.axes, mesh.tensor)
    failures = float(failed is not None)
    for axis in axes:
        flag = torch.tensor([failures], device=axis.control_device)
        if message := axis.combine(flag, "agree", maximum=True):
            message.finish()
        failures = float(flag[0])
    if not failures:
        return made[0]
    rank = dist.get_rank() if dist.is_initialized() else 0
    told = {} if failed is None else {rank: (failed.errno, failed.strerror)}
    for axis in axes:
        told = {place: why for others in axis.exchange_objects(told) for place, why in others.items()}
    if failed is not None:
        raise failed
    first = min(told)
    raise OffloadError(
        told[first][0], f"rank {first} has no room for the states that it should offload: {told[first][1]}"
    )
