"""Objects: every rank's picklable object, and bytes of tensors, without NumPy.

`torch.distributed.all_gather_object` does the same through NumPy, which PyTorch neither needs nor brings otherwise.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_objects(own: Any, group: dist.ProcessGroup, size: int, device: torch.device) -> list[Any]:
    """Every rank's ``own``, in order of ranks.

    Args:
        size: of ``group``.
        device: whose tensors ``group`` sends.
    """
    content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([content.numel()], device=device), group=group)
    numels = [int(length) for length in lengths]
    padded = content.new_zeros(max(numels))
    padded[: content.numel()] = content
    received = [torch.empty(max(numels), dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(received, padded.to(device), group=group)
    return [pickle.loads(bytes_of(part[:numel].cpu())) for part, numel in zip(received, numels, strict=True)]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
