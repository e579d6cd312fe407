"""Weights file: the header of a .safetensors file, which a stranger may have written, before a library reads it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Final, TypeGuard

from onecopy.untrusted import LARGEST_JSON, Refused, open_plain, parse_json, shorten

_LENGTH: Final = 8
"""Bytes of the header's length, at the start of the file."""

_SHARDING: Final = "DCP_SHARDING_INFO"
"""Where torch.distributed.checkpoint notes which part of a tensor a file has."""

_BOOL_BITS: Final = 8


def check_safetensors(path: Path) -> None:
    """Raise `Refused` unless a plain file has a header of bounded size whose tensors lie in the file.

    Raises:
        OSError: if it cannot be read.
    """
    with open_plain(path) as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= min(LARGEST_JSON, size - _LENGTH):
            raise Refused(f"its header claims {length:,} bytes, but the file has only {size:,}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise Refused("its header must hold a JSON object")
    notes = header.pop("__metadata__", None)
    for name, tensor in header.items():
        if not _fits(tensor, size - _LENGTH - length):
            raise Refused(f"its tensor {shorten(repr(name))} reaches beyond the file")
    if isinstance(notes, dict) and _SHARDING in notes:
        _check_sharding(notes[_SHARDING], header)


def _fits(tensor: Any, room: int) -> bool:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("dtype"), str):
        return False
    shape, places = tensor.get("shape"), tensor.get("data_offsets")
    if not _counts(shape) or not _counts(places) or len(places) != 2:
        return False
    # "BF16", "F8_E4M3": the first number of a dtype's name is its bits. An unknown dtype is left to the library.
    digits = re.match(r"[A-Z]+(\d{1,2})", tensor["dtype"])
    bits = int(digits[1]) if digits else _BOOL_BITS
    return bool(places[0] <= places[1] <= room and math.prod(shape) * bits <= 8 * (places[1] - places[0]))


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) < 65 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_sharding(text: Any, header: dict[str, Any]) -> None:
    parts = parse_json(text.encode()) if isinstance(text, str) else None
    for name, tensor in header.items():
        part = parts.get(name) if isinstance(parts, dict) else None
        offsets = part.get("saved_offsets") if isinstance(part, dict) else None
        if not _counts(offsets) or len(offsets) != len(tensor["shape"]):
            raise Refused(f"it does not say which part of {shorten(json.dumps(name))} it has")
