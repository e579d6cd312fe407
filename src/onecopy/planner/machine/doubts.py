"""Doubts: what a plan takes for granted of a machine, and where what was said of it does not go together."""

from __future__ import annotations

from typing import Final

from onecopy.planner.machine.machine import GPUS, Gpu, Machine
from onecopy.planner.quantities import gigabytes, rate

_ALIKE: Final = (0.90, 1.12)
"""Memory as given by what a GPU shows: boxes round, and GB are taken for GiB."""


def assumed(machine: Machine) -> str:
    """The GPU and the links whose figures times rest on, in one line."""
    gpu = machine.gpu
    between = f", {rate(machine.link)} for each GPU between nodes" if machine.nodes > 1 else ""
    host = "" if machine.host_memory else f", {gigabytes(machine.host_limit)} of host memory a node"
    return (
        f"assumed: {gpu.name}, {gpu.peak / 1e12:,.4g} TFLOP/s dense 16-bit, {rate(gpu.intra)} to others of its "
        f"node{between}{host}"
    )


def doubts(machine: Machine, kind: Gpu, precision: str) -> list[str]:
    """What does not go together, a line each.

    Args:
        machine: as it is planned for.
        kind: its GPU as the table has it, before figures were replaced.
        precision: of the job.
    """
    found = []
    memory = machine.gpu.memory
    if not _ALIKE[0] <= memory / kind.memory <= _ALIKE[1]:
        near = [key for key, gpu in GPUS.items() if _ALIKE[0] <= memory / gpu.memory <= _ALIKE[1]]
        other = f"; --gpu {' or '.join(near)} has about as much" if near else "; --tflops gives another speed"
        name = _article(kind.name)
        found.append(
            f"warning: memory is {gigabytes(memory)}, but {name} has {gigabytes(kind.memory)}: times are those of "
            f"{name}{other}"
        )
    if precision.startswith("bf16") and not machine.gpu.bf16:
        found.append(
            f"warning: {_article(kind.name)} has no bf16, torch emulates it at a fraction of the speed planned here; "
            f"take --precision fp16"
        )
    return found


def _article(name: str) -> str:
    """The name behind "a" or "an", as it is spoken."""
    return f"an {name}" if name[:1] in "AHLRM" else f"a {name}"
