"""A process group of any size inside one process: torch's fake group, which talks to nobody, and what it costs itself.

Its collectives return at once with numbers that mean nothing, so all the Python of an engine runs, and runs alone. They
are not free, though: a gather copies this rank's slice into each of N places. `Replay` does a step's collectives and
nothing else, so that their time can be told from the engine's.

A gather over 1024 ranks makes 1024 tensors, which takes longer than the engine and leaves the processor's caches cold.
The silent group is for what is to be compared over many ranks: its collectives write zeros, at once.

One private torch module, read in torch 2.13: `torch.testing._internal.distributed.fake_pg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from onecopy.observe.ledger import Entry

PHASES: Final = ("forward", "backward", "step")


class _Done(dist.Work):
    def wait(self, *_: object) -> bool:
        return True


class _SilentGroup(dist.ProcessGroup):
    """The collectives that a step of onecopy calls, and no others."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._done = _Done()

    def name(self) -> str:
        return "silent"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def all_gather_single(self, output: Tensor, *_: object) -> dist.Work:
        output.zero_()
        return self._done

    def reduce_scatter_single(self, output: Tensor, *_: object) -> dist.Work:
        output.zero_()
        return self._done

    def allreduce(self, *_: object) -> dist.Work:
        return self._done

    def broadcast(self, *_: object) -> dist.Work:
        return self._done

    def scatter(self, *_: object) -> dist.Work:
        return self._done

    def allgather(self, *_: object) -> dist.Work:
        return self._done


dist.Backend.register_backend("silent", lambda _, rank, size, __: _SilentGroup(rank, size), devices=["cpu"])


@contextmanager
def fake_group(num_ranks: int, backend: str = "fake") -> Iterator[None]:
    """Be rank 0 of ``num_ranks`` for a while, on a "fake" or a "silent" group."""
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Replay:
    """The collectives of one step of an engine, by phase, without the engine.

    Args:
        entries: what the ledger booked for the step, of fp32 states.
        num_ranks: of the group.
    """

    def __init__(self, entries: Sequence[Entry], num_ranks: int) -> None:
        self._calls: dict[str, list[Callable[[], object]]] = {phase: [] for phase in PHASES}
        for entry in entries:
            halves = 2 if entry.op == "all_reduce" else 1
            slice_bytes = entry.bytes_sent // entry.calls // halves // (num_ranks - 1)
            call = _call(entry.op, max(1, slice_bytes // torch.float32.itemsize), num_ranks)
            self._calls[entry.phase] += [call] * entry.calls

    def run(self, phase: str) -> None:
        for call in self._calls[phase]:
            call()


def _call(op: str, numel: int, num_ranks: int) -> Callable[[], object]:
    """The collective as `NativeCalls` in comm/native_calls.py issues it, on slices of ``numel`` elements."""
    whole, own = torch.zeros(numel * num_ranks), torch.zeros(numel)

    group = dist.group.WORLD
    assert group is not None
    if op == "all_gather":
        return lambda: group.all_gather_single(whole, own).wait()
    if op == "reduce_scatter":
        return lambda: group.reduce_scatter_single(own, whole, dist.ReduceScatterOptions()).wait()
    return lambda: group.allreduce([whole]).wait()
