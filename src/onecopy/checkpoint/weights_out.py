"""Weights out: safetensors files that all ranks write together, each the elements that it holds. Nothing is gathered.

    byte 0            length of the header, 8 bytes
    byte 8            header: dtype, shape and place of each tensor, as JSON
    byte 8 + length   tensors end to end, the widest dtype first, so that each begins at a multiple of its width

A slice is a run of a tensor's elements, and so a run of a file's bytes. Ranks that see one file system write their runs
into one file. Where they do not, or where files are written from front to back only (object stores, a disk in each
node), the first rank writes everything, one whole tensor at a time.

A file has a hidden name until it is complete. `save_pretrained.py` writes a model so, `export.py` a checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar

import torch
from torch import Tensor

from onecopy.checkpoint.group import Group
from onecopy.errors import CheckpointError, OnecopyError, UsageError

T = TypeVar("T")

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
"""Names of dtypes in a safetensors header."""

_PIECE: Final = 1 << 22
"""Elements that are copied to the host and cast at once."""

_LENGTH: Final = 8
"""Bytes of the header's length; headers are padded to multiples of it."""

_NO_RANDOM_WRITES: Final = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM}
"""What file systems answer that cannot set a file's length and write into its middle."""


class Source(Protocol):
    """Where the tensors come from.

    Attributes:
        tensors: by name in the files; on meta, of the shape and dtype that they get there.
    """

    tensors: Mapping[str, Tensor]

    def runs(self, name: str, together: bool) -> Iterable[tuple[int, Tensor]]:
        """What this rank writes of a tensor: places of first elements in the flattened tensor, and 1-D tensors.

        Every rank calls it, in one order.

        Args:
            together: each rank writes its own. Else the first rank gives the whole tensor, and others nothing.
        """
        ...


@dataclass(frozen=True)
class _File:
    """A weights file.

    Attributes:
        name: when it is complete.
        head: its first bytes, up to the tensors.
        places: byte at which each tensor begins.
        size: bytes of all of it.
    """

    name: str
    head: bytes
    places: Mapping[str, int]
    size: int


def write_weights(
    source: Source, directory: Path, *, group: Group, file_bytes: int, stem: str = "model"
) -> dict[str, int]:
    """Write ``STEM.safetensors``, or several files and ``STEM.safetensors.index.json``. Every rank calls it.

    Earlier files of the same stem are replaced once all new ones are complete. Memory: 4 Mi elements on the host.

    Args:
        directory: of the model; made if it is not there.
        file_bytes: most bytes of tensors in a file, but one tensor at least.

    Returns:
        Bytes of each file, by name.

    Raises:
        CheckpointError: on every rank, if a file cannot be written; what was there before stays as it was.
        UsageError: if safetensors knows no such dtype.
    """
    files = _lay_out(source.tensors, file_bytes, stem)
    token = group.on_first("writing weights", lambda: secrets.token_hex(4))
    hidden = {file.name: directory / f".writing-{token}-{file.name}" for file in files}
    try:
        together = _begin(group, directory, files, hidden)

        def write() -> None:
            for file in files:
                if together or group.rank == 0:
                    with hidden[file.name].open("r+b" if together else "wb") as out:
                        _write(source, file, out, together)
                else:
                    _write(source, file, None, together)

        group.together("writing weights", lambda: on_disk(directory, write))
        index = _index(files, source.tensors)
        group.on_first("writing weights", lambda: on_disk(directory, lambda: _complete(directory, hidden, index, stem)))
    except OnecopyError:
        if group.rank == 0:
            for path in hidden.values():
                path.unlink(missing_ok=True)
        raise
    return {file.name: file.size for file in files} | ({f"{stem}.safetensors.index.json": len(index)} if index else {})


def on_disk(target: Path, do: Callable[[], T], kind: type[OnecopyError] = CheckpointError) -> T:
    """What ``do`` returns, which writes to ``target``; an error of that kind if the system does not let it."""
    try:
        return do()
    except OSError as error:
        raise kind(f"cannot write {str(target)!r}: {error.strerror or error}") from None


def _lay_out(tensors: Mapping[str, Tensor], file_bytes: int, stem: str) -> list[_File]:
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{name!r} has dtype {tensor.dtype}, which safetensors cannot hold; onecopy.save can")
        if groups[-1] and used + tensor.nbytes > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += tensor.nbytes
    count = len(groups)
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        _lay_out_file(name, {key: tensors[key] for key in keys})
        for name, keys in zip(names if count > 1 else [f"{stem}.safetensors"], groups, strict=True)
    ]


def _lay_out_file(name: str, tensors: Mapping[str, Tensor]) -> _File:
    # Readers look at a tensor's bytes as elements, and so expect them at a multiple of the element's width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for key, tensor in ordered:
        ends.append(ends[-1] + tensor.nbytes)
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH)
    head = len(text).to_bytes(_LENGTH, "little") + text
    places = {key: len(head) + begin for (key, _), begin in zip(ordered, ends, strict=False)}
    return _File(name, head, places, len(head) + ends[-1])


def _begin(group: Group, directory: Path, files: Sequence[_File], hidden: Mapping[str, Path]) -> bool:
    """Make the files at their full length. Returns whether ranks can write them together."""

    def make() -> str | None:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            with hidden[file.name].open("wb") as out:
                out.write(file.head)
                try:
                    out.truncate(file.size)
                except OSError as error:
                    if error.errno not in _NO_RANDOM_WRITES:
                        raise
                    return f"its file system cannot write into the middle of a file ({error.strerror})"
        return None

    why = group.on_first("writing weights", lambda: on_disk(directory, make))

    def sees() -> bool:
        return all(
            path.exists() and path.stat().st_size == f.size for f, path in zip(files, hidden.values(), strict=True)
        )

    seen = group.together("writing weights", sees)
    if why is None and not all(seen):
        blind = ", ".join(str(rank) for rank, found in enumerate(seen) if not found)
        why = f"rank {blind} does not see the first rank's files there"
    if why is not None and group.rank == 0:
        warnings.warn(
            f"weights in {str(directory)!r} are written by the first rank alone, one whole tensor at a time: {why}; "
            f"for all ranks to write at once, name a directory of a file system that all of them share",
            stacklevel=4,
        )
    return why is None


def _write(source: Source, file: _File, out: BinaryIO | None, together: bool) -> None:
    if out is not None and not together:
        out.write(file.head)
    for name, place in file.places.items():
        dtype = source.tensors[name].dtype
        for start, run in source.runs(name, together):
            assert out is not None
            if together:
                out.seek(place + start * dtype.itemsize)
            for piece in run.split(_PIECE):
                out.write(_bytes_of(piece.to("cpu", dtype).contiguous()))
    if out is not None:
        out.flush()
        os.fsync(out.fileno())


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    if not tensor.numel():
        return b""
    # What looks at the memory must keep the tensor alive.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


def _index(files: Sequence[_File], tensors: Mapping[str, Tensor]) -> bytes:
    if len(files) == 1:
        return b""
    places = {key: file.name for file in files for key in file.places}
    total = sum(tensor.nbytes for tensor in tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": {key: places[key] for key in tensors}}
    return (json.dumps(table, indent=2) + "\n").encode()


def _complete(directory: Path, hidden: Mapping[str, Path], index: bytes, stem: str) -> None:
    """Give the files their names. In between no index is there, so that nobody takes old and new ones for one model."""
    listed = directory / f"{stem}.safetensors.index.json"
    listed.unlink(missing_ok=True)
    before = {directory / f"{stem}.safetensors", *directory.glob(f"{stem}-*-of-*.safetensors")}
    names = {directory / name for name in hidden}
    for stale in before - names:
        stale.unlink(missing_ok=True)
    for name, path in hidden.items():
        path.replace(directory / name)
    if index:
        written = directory / f".writing-{listed.name}"
        written.write_bytes(index)
        written.replace(listed)
