"""torch.distributed.checkpoint's file storage with what crash safety and trust add: checksums, aliases, plain files.

The files are DCP's own, so plain `dcp.load` reads them. Used of torch 2.13 beside its documented interface: the
attribute `fs` of `FileSystemWriter` and `FileSystemReader`, the file-system class behind it, and `_slice_file`, which
finds a tensor in a file; tests/house/test_private_apis.py fails clearly when they move.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

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

from onecopy.checkpoint.manifest import JOB, METADATA, FileEntry
from onecopy.checkpoint.metadata import read_metadata
from onecopy.checkpoint.values import check_archive, load_values
from onecopy.errors import DamagedCheckpointError
from onecopy.untrusted import Refused, open_plain, reason

PIECE: Final = 1 << 26
"""Bytes of the largest piece of a tensor that is written, and read, at once."""


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
        DamagedCheckpointError: if it cannot be used.
    """
    try:
        with open_plain(checkpoint / JOB) as file:
            job = load_values(file)
        if not _is_job(job):
            raise Refused("it does not have the form that onecopy.save writes")
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{checkpoint}: {JOB} cannot be used: {reason(error)}") from None
    found: dict[str, Any] = job
    return found


def _is_job(job: Any) -> bool:
    if not isinstance(job, dict) or not _is_table(job.get("aliases"), str) or not _is_table(job.get("objects"), object):
        return False
    if "optimizer" not in job:
        return True
    optimizer = job["optimizer"]
    return (
        isinstance(optimizer, dict)
        and isinstance(optimizer.get("kind"), str | None)
        and _is_table(optimizer.get("states"), dict)
        and isinstance(groups := optimizer.get("groups"), list)
        and all(isinstance(group, dict) and _is_table(group.get("values"), object) for group in groups)
        and all(isinstance(group.get("names"), list) for group in groups)
        and all(isinstance(name, str) for group in groups for name in group["names"])
    )


def _is_table(value: Any, of: type) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, of) for k, v in value.items())


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


class _PlainFileSystem(FileSystem):
    """A file system of plain files."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open_plain(Path(path)) as stream:
            yield cast(io.IOBase, stream)


class _Piece(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no place {base + offset} in a file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(room)  # type: ignore[attr-defined]
        self._position += count
        return count


class Reader(FileSystemReader):
    """DCP's reader of files that a stranger may have written; see `metadata.py` and `values.py`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _PlainFileSystem()
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked content of `.metadata`.

        Raises:
            DamagedCheckpointError: if it cannot be used.
        """
        if self._metadata is None:
            try:
                self._metadata = read_metadata(Path(self.path))
            except (OSError, ValueError) as error:
                raise DamagedCheckpointError(f"{self.path}: {METADATA} cannot be used: {reason(error)}") from None
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        piece = _Piece(file, sinfo.offset, sinfo.length)
        check_archive(cast(BinaryIO, piece))
        return piece
