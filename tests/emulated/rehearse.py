"""Rehearse: one rank of many on the emulated device without arithmetic (`device/rehearsal.h`), in a process of its own.

The program runs as it would on the first of N GPUs: the engine, PyTorch's own sharding, autograd and the optimizer are
the real ones. Collectives go to nobody. What the device was asked for comes back, to be played (`playback.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

import accelerator
import onecopy
from playback import Asked

Mark = Callable[[str], None]

_SHARDING = (str(Path(onecopy.__file__).parent), str(Path(dist.__file__).parent))
_MODULE = str(Path(torch.nn.modules.module.__file__))


def rehearse(num_ranks: int, function: Callable[[torch.device, Mark], None], *, timeout: float = 300.0) -> list[Asked]:
    """Call ``function(device, mark)`` as rank 0 of ``num_ranks``, in a forked process.

    Args:
        function: may be a closure. Its ``mark(name)`` writes a mark down on the stream that computes.
        timeout: seconds after which the process is killed.

    Returns:
        What the device was asked for, from the beginning.

    Raises:
        RuntimeError: if the process failed; its own output says why.
        TimeoutError: if it took too long.
    """
    built = accelerator.build()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        here.close()
        there.send(_rehearse(built, num_ranks, function))

    process = context.Process(target=run, daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(timeout):
            raise TimeoutError(f"the rehearsal of {num_ranks} ranks took longer than {timeout:g} s")
        return [Asked(*one) for one in here.recv()]
    except EOFError:
        raise RuntimeError("the rehearsal failed; its output is above") from None
    finally:
        process.kill()
        process.join()
        here.close()


def _rehearse(built: Path, num_ranks: int, function: Callable[[torch.device, Mark], None]) -> list[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.pop("ONECOPY_POISON", None)
    torch.set_num_threads(1)
    device = accelerator.start(built, 1, alone=True)
    device.rehearse(_is_sharding)
    torch.accelerator.set_device_index(0)
    dist.init_process_group(accelerator.BACKEND, rank=0, world_size=num_ranks, store=FakeStore())
    function(torch.device(accelerator.NAME, 0), device.mark)
    asked: list[Any] = device.asked()
    return asked


def _is_sharding() -> bool:
    """Whether the line that runs is the sharding's, and not the model's or the loop's."""
    frame = sys._getframe().f_back
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind:
            return kind == "sharding"
        frame = frame.f_back
    return False


@cache
def _kind(code: CodeType) -> str:
    if code.co_filename.startswith(_SHARDING):
        return "sharding"
    return "model" if code.co_filename == _MODULE else ""
