"""Metadata: which tensors a checkpoint has and where their bytes lie, as DCP pickles it, of which nothing is believed.

It is read by a closed list of classes, so that nothing in it can run code. Then every place that it names is looked
at: a plain file of the checkpoint that has those bytes. So no tensor is larger than the files, and none has a hole.
"""

from __future__ import annotations

import io
import math
import pickle
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from onecopy.checkpoint.manifest import METADATA
from onecopy.checkpoint.values import check_pickle
from onecopy.untrusted import Refused, plain_name, plain_size, read_plain, reason, shorten

_LARGEST: Final = 1 << 30
"""Bytes of metadata that are read: some 4 million pieces of tensors."""

_ALLOWED: Final = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _ClosedUnpickler(pickle.Unpickler):
    """Reads the classes that DCP's metadata is made of, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata needs")


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, for which some versions of Python (3.11.2) write `getattr`; and nothing else."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no metadata needs")


def read_metadata(checkpoint: Path) -> Metadata:
    """The metadata of a checkpoint, checked against its files.

    Raises:
        Refused: if it cannot be used.
        OSError: if it, or a file that it names, is not there.
    """
    content = read_plain(checkpoint / METADATA, _LARGEST)
    check_pickle(content)
    try:
        metadata = _ClosedUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # An unpickler raises whatever the classes raise that it builds.
        raise Refused(reason(error)) from None
    if type(metadata) is not Metadata:
        raise Refused(
            f"it must hold a Metadata object of torch.distributed.checkpoint; found {type(metadata).__name__}"
        )
    _check_tensors(metadata, _check_places(metadata, checkpoint))
    return metadata


def _check_places(metadata: Metadata, checkpoint: Path) -> int:
    """Every piece lies in a plain file of the checkpoint. Returns the bytes of all these files."""
    sizes: dict[str, int] = {}
    if not isinstance(metadata.storage_data, dict):
        raise Refused("it does not say in which files tensors are")
    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo or not isinstance(index.fqn, str):
            raise Refused("it gives a tensor's place in a form that torch.distributed.checkpoint does not write")
        if getattr(place, "transform_descriptors", None):
            raise Refused("its tensors are compressed; onecopy reads only uncompressed tensors")
        if place.relative_path not in sizes:
            name = plain_name(place.relative_path)
            sizes[name] = plain_size(checkpoint / name)
        _count(place.offset, place.length)
        if place.offset + place.length > sizes[place.relative_path]:
            raise Refused(f"a piece of {shorten(index.fqn)!r} lies beyond the end of {place.relative_path!r}")
    return sum(sizes.values())


def _check_tensors(metadata: Metadata, total: int) -> None:
    """Every tensor is made of pieces that lie within it, leave nothing out and are in a file."""
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.planner_data, dict | None):
        raise Refused("it lists no tensors")
    places: dict[Any, Any] = metadata.storage_data
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or type(tensor) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise Refused("it lists something that is not a tensor")
        path = (metadata.planner_data or {}).get(key, ())
        if not isinstance(path, tuple) or not all(isinstance(part, str | int) for part in path):
            raise Refused(f"the path of {shorten(key)!r} is none")
        if isinstance(tensor, BytesStorageMetadata):
            continue
        if type(tensor.properties) is not TensorProperties or not isinstance(tensor.properties.dtype, torch.dtype):
            raise Refused(f"{shorten(key)!r} has no dtype")
        size, width, held = _size(tensor.size), tensor.properties.dtype.itemsize, 0
        if not isinstance(tensor.chunks, list):
            raise Refused(f"{shorten(key)!r} has no pieces")
        for chunk in tensor.chunks:
            if type(chunk) is not ChunkStorageMetadata:
                raise Refused(f"{shorten(key)!r} has no pieces")
            offsets, sizes = _size(chunk.offsets), _size(chunk.sizes)
            if not len(size) == len(offsets) == len(sizes) or any(
                offset + count > whole for offset, count, whole in zip(offsets, sizes, size, strict=True)
            ):
                raise Refused(f"a piece of {shorten(key)!r} lies outside of it")
            place = places.get(MetadataIndex(key, offsets))
            if place is None or place.length < math.prod(sizes) * width:
                raise Refused(f"a piece of {shorten(key)!r} is in no file")
            held += math.prod(sizes)
        if held != math.prod(size) or held * width > total:
            raise Refused(f"{shorten(key)!r} has {math.prod(size)} elements, and its pieces {held}")


def _size(size: Any) -> torch.Size:
    if not isinstance(size, torch.Size):
        raise Refused("a size must be a torch.Size")
    _count(*size)
    return size


def _count(*numbers: Any) -> None:
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise Refused("a number of bytes or elements is not a whole number of at least 0")
