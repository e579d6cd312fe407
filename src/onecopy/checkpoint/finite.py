"""Finite: which of a rank's tensors holds nan or inf. One pass over memory, and no copy of any of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onecopy.sharding.tensor.sliced import SlicedTensor


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor of which this rank's part holds nan or inf; None if there is none."""
    names, highest = [], []
    for name, tensor in tensors:
        own = _own_part(tensor)
        if own.numel() and (own.is_floating_point() or own.is_complex()):
            names.append(name)
            highest.append(torch.linalg.vector_norm(own, torch.inf).float())
    if not highest:
        return None
    found = torch.stack(highest).isfinite().logical_not()
    return names[int(found.int().argmax())] if found.any() else None


def _own_part(tensor: Tensor) -> Tensor:
    if isinstance(tensor, SlicedTensor):
        tensor = tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
