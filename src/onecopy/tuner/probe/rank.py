"""Rank: one process of a probe. It builds, shards and steps the workload, and says through a pipe where it is.

What it has said stays in the pipe however it ends, so that the phase of a death is known.

On the CPU a limit of memory is kept in two ways. RLIMIT_DATA, set anew in each phase up to the first step's end, makes
an allocation fail that is far beyond it; and whenever a phase ends, the kernel's count of what was held is compared.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist

import onecopy
from onecopy.errors import CollectiveError
from onecopy.observe.meter import process_memory
from onecopy.recipes.world import World
from onecopy.tuner.probe.order import Order, Phase
from onecopy.tuner.workload import Workload, ranks_agree

_WANT_OF_MEMORY: Final = re.compile(
    r"can't allocate memory|Cannot allocate memory|bad_alloc|out of memory|OutOfMemory|can't start new thread|"
    r"Resource temporarily unavailable",
    re.IGNORECASE,
)
_ASKED: Final = re.compile(r"allocate (?:memory: you tried to allocate )?([0-9.]+) (bytes|MiB|GiB)")
_UNITS: Final = {"bytes": 1, "MiB": 2**20, "GiB": 2**30}


_RESERVED: Final = 96 * 2**20
"""Private bytes that a process may map beyond the limit, as it does not touch them: stacks of threads, and the rest of
a region's chunk (`memory/arena.py`). What it touches is held to the limit at the end of each phase."""


class Line:
    """What a rank says, a JSON object a line.

    Args:
        limit: bytes that this process may hold, which is seen to whenever it enters a phase; None for no limit.
    """

    def __init__(self, pipe: int, limit: int | None) -> None:
        self._pipe = pipe
        self._limit = limit
        self._start = perf_counter()

    def say(self, **values: Any) -> None:
        """Write at once; a pipe whose reader has gone is no error of the probe's."""
        values["at"] = perf_counter() - self._start
        with suppress(OSError):
            os.write(self._pipe, (json.dumps(values) + "\n").encode())

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Begin a phase, if the one before has kept to the limit.

        Raises:
            MemoryError: if it has not.
        """
        self.check_memory(step)
        self.say(phase=phase, step=step)

    def check_memory(self, step: int) -> None:
        """Raise `MemoryError` if the process has held more than it may, by the kernel's count."""
        if self._limit is None:
            return
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if held > self._limit:
            raise MemoryError(f"the process held {held} bytes of {self._limit}")
        if step == 0 and (now := process_memory().get("resident")):
            # Steps that are timed do without this look: what they map, the first one has mapped before.
            room = max(0, self._limit - now) + _RESERVED
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + room, resource.RLIM_INFINITY))


def run(workload: Workload, order: Order, place: int, pipe: int) -> int:
    """Be the rank at ``place`` of the order. Returns the exit code."""
    line = Line(pipe, order.limits.memory if order.device == "cpu" and not order.limits.control_group else None)
    rank, local = order.ranks[place], order.local_ranks[place]
    try:
        _measure(workload, order, World(rank, local, order.size, _device(order.device, local)), line)
    except BaseException as error:
        _confess(error, line)
        sys.stdout.flush()
        sys.stderr.flush()
        return 1
    return 0


def _device(kind: str, local: int) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, local)


def _measure(workload: Workload, order: Order, world: World, line: Line) -> None:
    candidate, device, length = order.candidate, world.device, order.length
    torch.set_num_threads(order.threads)
    if device.type != "cpu":
        torch.accelerator.set_device_index(world.local_rank)
    _limit_memory(order, device)
    # Of an accelerator's memory nothing is taken yet.
    line.say(base=process_memory().get("resident", 0) if device.type == "cpu" else 0)
    # A user's own code may ask for its place as torchrun's programs do.
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank), "WORLD_SIZE": str(order.size)}
    if order.size > 1:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            init_method=order.meeting,
            rank=world.rank,
            world_size=order.size,
            timeout=timedelta(seconds=order.limits.seconds),
        )
    torch.manual_seed(0)
    line.enter("build")
    model = workload.build()
    line.enter("load")
    model, optimizer = workload.shard(model, candidate, world)
    meter = onecopy.meter(model)
    line.enter("batch")
    # Ranks that share samples must see the same ones.
    torch.manual_seed(1 + world.rank // candidate.tensor)
    batch = _moved(workload.batch(candidate.micro_batch), device)

    timed = 0.0
    done = 0
    while True:
        start = _now(device)
        for _ in range(candidate.accumulate):
            line.enter("forward", done)
            loss = workload.loss(model, batch) / candidate.accumulate
            line.enter("backward", done)
            loss.backward()
            del loss
        line.enter("step", done)
        workload.update(model, optimizer)
        seconds = _now(device) - start
        line.check_memory(done)
        line.say(seconds=seconds)
        done += 1
        timed += seconds if done > 1 else 0.0
        slow = length.give_up_over is not None and done == 3 and timed / 2 > length.give_up_over
        if ranks_agree(slow, device):
            line.say(gave_up=True)
            break
        if ranks_agree(done >= length.least and (timed >= length.seconds or done >= length.most), device):
            break
    if device.type != "cpu":
        line.say(peak=torch.accelerator.max_memory_allocated(device))
    line.say(metered=meter.peak, off_device=meter.off_device_peak)
    if order.size > 1:
        dist.barrier()


def _now(device: torch.device) -> float:
    """The time when what was begun has ended."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def _moved(batch: Any, device: torch.device) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _limit_memory(order: Order, device: torch.device) -> None:
    """Tell an accelerator's allocator the limit; on the CPU `Line` and control groups see to it."""
    limit = order.limits.memory
    if limit is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(device)[1]), device)


def _data_bytes() -> int:
    """Private writable bytes of the process, as RLIMIT_DATA counts them."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(row.split()[1]) * 1024 for row in status if row.startswith("VmData:"))


def _confess(error: BaseException, line: Line) -> None:
    """Say what was raised; for want of memory first of all make room to say it."""
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    text = " ".join(str(error).split())
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_WANT_OF_MEMORY.search(text))
    asked = _ASKED.search(text)
    if torch.cuda.is_initialized():
        line.say(peak=torch.cuda.max_memory_allocated())
    line.say(
        error=f"{type(error).__name__}: {text}"[:2000],
        traceback=traceback.format_exc()[-8000:],
        memory=memory,
        asked=int(float(asked[1]) * _UNITS[asked[2]]) if asked else None,
        peer=isinstance(error, CollectiveError) and not memory,
    )
