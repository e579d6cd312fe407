"""Here: this machine as the planner sees it: GPUs, memory, limits, and a short look at speed and link.

What torch reports is taken as it is. What it does not is measured: a matrix product of a fraction of a second, two
processes of this host sending to each other, a copy in its memory, and its disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from onecopy.errors import OffloadError, SettingsError
from onecopy.memory.store.files import File
from onecopy.observe.meter import process_memory
from onecopy.planner.machine.machine import Gpu, Machine, gpu_named

_PROBE_SECONDS: Final = 60
_PROBE: Final = """
import os, sys, time, torch, torch.distributed as dist
rank, path, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method="file://" + path, rank=rank, world_size=2)
own = torch.zeros((256 if device == "cuda" else 16) << 20, dtype=torch.uint8, device=device)
both = torch.empty(2 * own.numel(), dtype=torch.uint8, device=device)
best = float("inf")
for _ in range(4):
    dist.barrier()
    start = time.perf_counter()
    if device == "cuda":
        dist.all_gather_into_tensor(both, own)
        torch.cuda.synchronize()
    else:
        work = [dist.isend(own, 1 - rank), dist.irecv(both[: own.numel()], 1 - rank)]
        for one in work:
            one.wait()
    best = min(best, time.perf_counter() - start)
if rank == 0:
    print(own.numel() / best)
dist.destroy_process_group()
"""


def look(gpus: int | None = None) -> tuple[Machine, str]:
    """This machine, and what was found in words.

    Args:
        gpus: how many to plan for; all, or 2 ranks on a host without any.

    Raises:
        SettingsError: if there are fewer GPUs than asked for.
    """
    host = _host_memory()
    if torch.cuda.is_available():
        found = torch.cuda.device_count()
        if gpus is not None and gpus > found:
            raise SettingsError(f"--gpus is {gpus} but this machine has {found}; leave --here out to plan for more")
        count = gpus or found
        properties = torch.cuda.get_device_properties(0)
        name, memory, device = properties.name, float(properties.total_memory), "cuda"
    else:
        count = gpus or 2
        name, memory, device = f"CPU, {os.cpu_count()} cores", host / count, "cpu"
    intra = _link(device) if device == "cpu" or torch.cuda.device_count() > 1 else 25e9
    known = gpu_named(name)
    peak = known.peak if known else _flops(device, count)
    gpu = Gpu(
        memory,
        peak,
        intra,
        known.memory_bandwidth if known else 10e9,
        known.host if known else 10e9,
        known.bf16 if known else True,
        name,
    )
    # What was measured is what is reached; nothing is to be taken off for efficiency again.
    machine = Machine(
        count,
        gpu,
        host_memory=host,
        host_bandwidth=(memory_rate := _memory_rate()),
        nvme_bandwidth=(disk_rate := _disk_rate()),
        computes_on_host=device == "cpu",
        utilisation=None if known else 0.7,
        link_efficiency=1.0,
        crowding=0.0,
        latency=1e-4 if device == "cpu" else 1e-5,
    )
    words = (
        f"here: {count} × {name}, {memory / 1e9:,.1f} GB each, host memory {host / 1e9:,.1f} GB, "
        f"{peak / 1e12:,.3g} TFLOP/s {'by its data sheet' if known else 'measured'}, "
        f"link {intra / 1e9:,.2f} GB/s in each direction, host memory {memory_rate / 1e9:,.1f} GB/s, "
        f"disk of {tempfile.gettempdir()} {disk_rate / 1e9:,.2f} GB/s"
    )
    return machine, words


def _host_memory() -> float:
    """Bytes of this host, or of the limit that it runs under."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    if (limit := process_memory().get("cgroup_limit")) is not None:
        limits.append(float(limit))
    return min(limits)


def _flops(device: str, ranks: int) -> float:
    """Operations a second that each of ``ranks`` reaches in a matrix product; on CPU they share the cores."""
    size = 8192 if device == "cuda" else 768
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        start = perf_counter()
        left @ left
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best / (ranks if device == "cpu" else 1)


def _memory_rate() -> float:
    """Bytes a second that a copy in host memory reads and writes."""
    source, target = torch.ones(2**25), torch.zeros(2**25)
    return 2 * source.nbytes / min(_timed(lambda: target.copy_(source)) for _ in range(4))


def _disk_rate() -> float:
    """Bytes a second that the disk of temporary files reads and writes, as offload does; 64 MiB of it are taken."""
    try:
        file = File(Path(tempfile.gettempdir()))
        memory = torch.zeros(2**26, dtype=torch.uint8)
        start = file.extend(memory.nbytes)
        write = min(_timed(lambda: file.write(memory, start).wait()) for _ in range(2))
        read = min(_timed(lambda: file.read(memory, start).wait()) for _ in range(2))
    except OffloadError as error:
        raise SettingsError(f"the disk could not be measured: {error}; set TMPDIR to another directory") from None
    return 2 * memory.nbytes / (write + read)


def _timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def _link(device: str) -> float:
    """Bytes a second that each of two processes sends while it receives as much.

    Raises:
        SettingsError: if they do not come to an end.
    """
    path = Path(f"/tmp/onecopy-probe-{os.getpid()}")
    command = [sys.executable, "-c", _PROBE]
    probes = [
        subprocess.Popen([*command, str(rank), str(path), device], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        answer, _ = probes[0].communicate(timeout=_PROBE_SECONDS)
        return float(answer)
    except (subprocess.TimeoutExpired, ValueError):
        raise SettingsError("the link could not be measured; leave --here out and give --gpus and --intra") from None
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
        path.unlink(missing_ok=True)
