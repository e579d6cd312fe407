"""Manifest: what belongs to a checkpoint, with sizes and checksums. It is written last, and it guards itself.

A checkpoint is whole if its manifest is what was written, and every file that it lists has its size and SHA-256. So a
file that is missing, cut short or has one bit changed is found, and so is a save that never came to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from onecopy.errors import DamagedCheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Version of the checkpoint's layout; a larger one is refused."""

_PIECE: Final = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file: its bytes, and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """See the file's first lines.

    Attributes:
        step: the training step that was saved.
        sequence: counts the saves into one directory, whatever their steps.
        ranks: how many ranks saved it.
        saved_by: for people: versions, the stage, the time.
        files: every other file of the checkpoint, by name.
    """

    step: int
    sequence: int
    ranks: int
    saved_by: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def dump(self) -> bytes:
        """As JSON, with a checksum of itself."""
        body = asdict(self)
        return json.dumps({"sha256": _digest(body), **body}, indent=1).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: if there is none, it cannot be read, or it is not what was written.
    """
    path = checkpoint / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        expected = body.pop("sha256")
        if expected != _digest(body):
            raise ValueError("its checksum does not fit its content")
        if body["format"] > FORMAT:
            raise ValueError(f"it has format {body['format']} and this version of onecopy reads up to {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
        return Manifest(files=files, **body)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{checkpoint}: there is no {MANIFEST}, so its save never came to an end"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{checkpoint}: {MANIFEST} cannot be used: {error}") from None


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raise `DamagedCheckpointError` unless every file is there with its size. Reads no content."""
    for name, entry in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} is missing ({error.strerror})") from None
        if size != entry.size:
            raise DamagedCheckpointError(
                f"{checkpoint}: file {name!r} has {size} bytes where {entry.size} were written"
            )


def check_content(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `DamagedCheckpointError` if the bytes of one of the files ``names`` are not what was written."""
    for name in names:
        digest = hashlib.sha256()
        try:
            with (checkpoint / name).open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} cannot be read ({error.strerror})") from None
        if digest.hexdigest() != manifest.files[name].sha256:
            raise DamagedCheckpointError(f"{checkpoint}: the bytes of file {name!r} are not those that were written")


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
