"""Arena: contiguous regions, each for tensors of one lifetime (ZeRO §6.3, M_D).

Activation checkpoints and gradients live long, what is computed between them is gone at once. Taken from one heap, the
long-lived ones end up between holes that no larger tensor fits into, and memory runs out while much of it is free:

    one heap     |C1|····|C2|·····|C3|······|        a tensor of 10 finds no place, 15 are free
    two regions  |C1|C2|C3|     |···············|    it does

A region is reserved in chunks and never given back. On the CPU a chunk is mapped memory, of which the system hands out
pages when they are first written to. On CUDA a region is a `torch.cuda.MemPool`, to which PyTorch's own allocator
keeps. Elsewhere tensors come from PyTorch as ever. A piece is free again when the last view of its tensor is gone.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import insort
from typing import Any, Final

import torch
from torch import Tensor

DEFAULT_CHUNK_BYTES: Final = 64 * 2**20
"""Address space of a chunk. Larger tensors get a chunk of their own size."""

_ALIGNMENT: Final = 64
"""Bytes. The widest vector loads of CPUs."""


class Arena:
    """Regions by name, made as they are asked for.

    Args:
        chunk_bytes: by how much a region grows.
    """

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._regions: dict[str, Region] = {}
        self._pools: dict[tuple[str, torch.device], Any] = {}

    def empty(self, region: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of undefined values in the named region."""
        if device.type == "cpu":
            return self.region(region).empty(numel, dtype)
        if device.type == "cuda":
            pool = self._pools.get((region, device))
            if pool is None:
                pool = self._pools[region, device] = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool, device):
                return torch.empty(numel, dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

    def region(self, name: str) -> Region:
        """The region of that name, on the CPU."""
        if name not in self._regions:
            self._regions[name] = Region(self._chunk_bytes)
        return self._regions[name]


class Region:
    """Memory of the CPU for tensors of one lifetime. First fit; neighbouring holes are joined.

    Attributes:
        used: bytes of live tensors, each rounded up to 64.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.used = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[mmap.mmap] = []
        # (chunk, start, stop) in bytes, in order.
        self._holes: list[tuple[int, int, int]] = []

    @property
    def reserved(self) -> int:
        """Bytes of address space."""
        return sum(len(chunk) for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Add one contiguous chunk of ``nbytes`` (rounded up to 64)."""
        nbytes = _round_up(nbytes)
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._chunks.append(mmap.mmap(-1, nbytes, **flags))
        self._holes.append((len(self._chunks) - 1, 0, nbytes))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of undefined values."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        nbytes = _round_up(numel * dtype.itemsize)
        chunk, start = self._take(nbytes)
        piece = memoryview(self._chunks[chunk])[start : start + nbytes]
        # PyTorch holds the piece as long as any view of the tensor lives.
        weakref.finalize(piece, self._free, chunk, start, start + nbytes).atexit = False
        self.used += nbytes
        with torch.inference_mode(False):
            return torch.frombuffer(piece, dtype=dtype, count=numel)

    def _take(self, nbytes: int) -> tuple[int, int]:
        for position, (chunk, start, stop) in enumerate(self._holes):
            if stop - start >= nbytes:
                rest = [(chunk, start + nbytes, stop)] if stop - start > nbytes else []
                self._holes[position : position + 1] = rest
                return chunk, start
        self.reserve(max(nbytes, self._chunk_bytes))
        return self._take(nbytes)

    def _free(self, chunk: int, start: int, stop: int) -> None:
        self.used -= stop - start
        insort(self._holes, (chunk, start, stop))
        joined: list[tuple[int, int, int]] = []
        for hole in self._holes:
            if joined and joined[-1][0] == hole[0] and joined[-1][2] == hole[1]:
                joined[-1] = (hole[0], joined[-1][1], hole[2])
            else:
                joined.append(hole)
        self._holes = joined


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
