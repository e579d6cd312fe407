"""torch.distributed.checkpoint's file storage with what crash safety and trust add: checksums, aliases, a closed list.

The files are DCP's own, so plain `dcp.load` reads them. Used of torch 2.13 beside its documented interface: the
attribute `fs` of `FileSystemWriter` and the file-system class behind it; tests/test_private_apis.py fails clearly when
they move.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from onecopy.checkpoint.manifest import FileEntry
from onecopy.checkpoint.random import unpack_bytes
from onecopy.errors import DamagedCheckpointError

PIECE: Final = 1 << 26
"""Bytes of the largest piece of a tensor that is written, and read, at once."""


JOB: Final = "job.pt"
"""What is no tensor of the model's size: scheduler, scaler, groups, extra. Read with `weights_only`."""


class _HashingStream(io.RawIOBase):
    """A file being written once, front to back, and its checksum."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, piece: Any) -> int:
        self._digest.update(piece)
        self._size += memoryview(piece).nbytes
        return self._file.write(piece)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        # Whoever asks is about to sync.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self._size, self._digest.hexdigest())


class _HashingFileSystem(FileSystem):
    """A file system that remembers what was written to it."""

    def __init__(self) -> None:
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashingStream(Path(path)) as hashed:
            yield hashed
        self.written[Path(path).name] = hashed.entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes one rank's files; see the file's first lines.

    Args:
        path: an empty directory.
        aliases: from each further key of a tensor to the key under which it is written.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._aliases = aliases

    @property
    def written(self) -> dict[str, FileEntry]:
        """The files that this rank has written."""
        return self.fs.written

    def write_small(self, name: str, content: bytes) -> None:
        """Write one more file."""
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            stream.write(content)
            os.fsync(stream.fileno())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`. Aliases point at the bytes of what they stand for, so nothing is stored twice."""
        for alias, key in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            metadata.planner_data[alias] = (alias.partition(".")[0], alias.partition(".")[2])
        copies = [
            replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
            for alias, key in self._aliases.items()
            for result in (result for rank in results for result in rank if result.index.fqn == key)
        ]
        super().finish(metadata, [*results, copies])


class Planner(DefaultSavePlanner):
    """DCP's planner, whose data may be copied before it is written, or be made only when it is asked for.

    Large pieces are cut into rows of at most ``PIECE`` bytes: whoever reads the checkpoint needs no larger buffer, and
    ranks that hold the same can share them evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._rows: dict[MetadataIndex, tuple[WriteItem, int, int]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or isinstance(self.state_dict[item.index.fqn], LazyTensor):
            return [item]
        offsets, sizes = data.chunk.offsets, data.chunk.sizes
        nbytes = sizes.numel() * data.properties.dtype.itemsize
        if nbytes <= PIECE or not sizes:
            return [item]
        step = max(1, sizes[0] * PIECE // nbytes)
        pieces = []
        for row in range(0, sizes[0], step):
            count = min(step, sizes[0] - row)
            chunk = ChunkStorageMetadata(torch.Size((offsets[0] + row, *offsets[1:])), torch.Size((count, *sizes[1:])))
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            self._rows[index] = (item, row, count)
            pieces.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
        return pieces

    def copy_data(self, plan: SavePlan) -> int:
        """Copy all that ``plan`` writes to the host, so that training may go on. Returns the bytes."""
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                data = self.lookup_object(item.index).detach()
                self._copies[item.index] = data.clone() if data.device.type == "cpu" else data.cpu()
        # Nothing else may keep the model's memory alive.
        self.state_dict = {}
        return sum(copy.nbytes for copy in self._copies.values())

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index in self._copies:
            return self._copies.pop(index)
        found = self.state_dict[index.fqn]
        if isinstance(found, LazyTensor):
            return found.make()
        if index in self._rows:
            item, row, count = self._rows[index]
            return super().lookup_object(item.index).detach().narrow(0, row, count)
        return super().lookup_object(index)


def read_job(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors: the content of `JOB`.

    Raises:
        DamagedCheckpointError: if it cannot be read.
    """
    try:
        job: dict[str, Any] = unpack_bytes((checkpoint / JOB).read_bytes())
        return job
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DamagedCheckpointError(f"{checkpoint}: {JOB} cannot be read: {error}") from None


class LazyTensor:
    """A whole tensor that is made when it is written: converters never hold more than one."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, make: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.make = make

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        origin = torch.Size([0] * len(self.shape))
        data = TensorWriteData(ChunkStorageMetadata(origin, self.shape), TensorProperties(self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, origin), WriteItemType.SHARD, tensor_data=data)]


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


class Reader(FileSystemReader):
    """DCP's reader, with `.metadata` read by a closed list of classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _ClosedUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise DamagedCheckpointError(f"{self.path}: .metadata cannot be read: {error}") from None
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
