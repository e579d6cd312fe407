"""The random number generators of a rank: torch's on the CPU and the device, Python's, and numpy's if it is in use.

They travel as one uint8 tensor for each rank, together with what the caller wants kept by rank.
"""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.values import load_values
from onecopy.comm.objects import bytes_of


def take_generators() -> dict[str, Any]:
    """The state of every generator, in types that `torch.load(weights_only=True)` reads."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def put_generators(states: dict[str, Any]) -> None:
    """Continue the streams that `take_generators` saw."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def pack(value: Any) -> Tensor:
    """A value of plain types and tensors as a uint8 tensor.

    Raises:
        Exception: if it would not be read again, or cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    unpack_bytes(buffer.getvalue())
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """The value that `pack` packed."""
    return unpack_bytes(bytes_of(packed))


def unpack_bytes(content: bytes) -> Any:
    """A value of plain types and tensors; nothing in it can run code. Raises `Refused` if it is something else."""
    return load_values(io.BytesIO(content))
