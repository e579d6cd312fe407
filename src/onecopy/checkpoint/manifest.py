"""Manifest: what belongs to a checkpoint, with sizes and checksums. It is written last, and it guards itself.

A checkpoint is whole if its manifest is what was written, and every file that it lists has its size and SHA-256. So a
file that is missing, cut short or has one bit changed is found, and so is a save that never came to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from onecopy.errors import DamagedCheckpointError
from onecopy.untrusted import Refused, open_plain, plain_name, plain_size, read_json, reason

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Version of the checkpoint's layout; a larger one is refused."""

METADATA: Final = ".metadata"
"""Which tensors there are, and where; see `metadata.py`."""

JOB: Final = "job.pt"
"""What is no tensor of the model's size: scheduler, scaler, groups, extra. Read with `weights_only`."""

NEEDED: Final = (JOB, METADATA)
"""Files that every checkpoint has."""

LARGEST: Final = 1 << 53
"""What a step, a count of saves or ranks, or a number of bytes stays below: any reader of JSON keeps it exactly."""

_CHECKSUM: Final = re.compile(r"[0-9a-f]{64}")
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
    try:
        body = read_json(checkpoint / MANIFEST)
        if not isinstance(body, dict):
            raise Refused("it must hold a JSON object")
        expected = body.pop("sha256", None)
        if expected != _digest(body):
            raise Refused("its content does not match its checksum")
        return _manifest(body)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{checkpoint}: there is no {MANIFEST}, so its save was never completed") from None
    except (OSError, Refused) as error:
        raise DamagedCheckpointError(f"{checkpoint}: {MANIFEST} cannot be used: {reason(error)}") from None


def _manifest(body: Mapping[str, Any]) -> Manifest:
    """The manifest that a table holds, of which the checksum says that it is unchanged, and not that it makes sense."""
    number = body.get("format")
    if type(number) is not int or not 1 <= number <= FORMAT:
        raise Refused(f"its format is {number!r}, but this version of onecopy reads formats 1 to {FORMAT}")
    expected = {"step", "sequence", "ranks", "saved_by", "files", "format"}
    if body.keys() != expected:
        raise Refused(f"it must have {', '.join(sorted(expected))}; found {', '.join(sorted(body))}")
    step, sequence, ranks = (_number(body, name) for name in ("step", "sequence", "ranks"))
    saved_by, files = body["saved_by"], body["files"]
    if not isinstance(saved_by, dict) or not isinstance(files, dict):
        raise Refused("saved_by and files must be tables")
    return Manifest(step, sequence, ranks, saved_by, {plain_name(name): _entry(files[name]) for name in files})


def _number(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise Refused(f"{name} must be a number from 0 to 2**53; found {value!r}")
    return value


def _entry(value: Any) -> FileEntry:
    if not isinstance(value, dict) or value.keys() != {"size", "sha256"}:
        raise Refused("it must give size and sha256 for each file, and nothing else")
    if not isinstance(value["sha256"], str) or not _CHECKSUM.fullmatch(value["sha256"]):
        raise Refused("a sha256 must be 64 hexadecimal digits")
    return FileEntry(_number(value, "size"), value["sha256"])


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raise `DamagedCheckpointError` unless every file is there with its size. Reads no content."""
    for name in NEEDED:
        if name not in manifest.files:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} is not listed in {MANIFEST}")
    for name, entry in manifest.files.items():
        try:
            size = plain_size(checkpoint / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} is missing ({error.strerror})") from None
        except Refused as error:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} cannot be used: {error}") from None
        if size != entry.size:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} must have {entry.size} bytes; found {size}")


def check_content(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `DamagedCheckpointError` if the bytes of one of the files ``names`` are not what was written."""
    for name in names:
        digest = hashlib.sha256()
        try:
            with open_plain(checkpoint / name) as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except (OSError, Refused) as error:
            raise DamagedCheckpointError(f"{checkpoint}: file {name!r} cannot be read ({reason(error)})") from None
        if digest.hexdigest() != manifest.files[name].sha256:
            raise DamagedCheckpointError(f"{checkpoint}: the content of file {name!r} has changed since it was written")


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
