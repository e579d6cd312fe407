"""A directory of checkpoints, in which a crash at any moment leaves whole ones or nothing.

    DIR/latest                  the name of the checkpoint to load; moved last, by one rename
    DIR/step-00000200/          a whole checkpoint: it got this name by one rename, after its last byte was on the disk
    DIR/.saving-step-00000300/  one that is being written, or what a crash left of it
    DIR/.removing-.../          one that is being deleted
    DIR/.writer                 locked by the run that saves here; see claim.py

Only the first rank calls what changes names.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Final

from onecopy.checkpoint.manifest import LARGEST, MANIFEST, check_sizes, read_manifest, write_synced
from onecopy.errors import CheckpointError, DamagedCheckpointError
from onecopy.untrusted import LONGEST_NAME, read_plain, shorten

LATEST: Final = "latest"
_SAVING: Final = ".saving-"
_REMOVING: Final = ".removing-"
_NAME: Final = re.compile(r"step-\d{8,}(-\d+)?")


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is meant as one checkpoint, and not as a directory of them."""
    return (path / MANIFEST).exists() or _NAME.fullmatch(path.name) is not None


def find_checkpoints(directory: Path) -> list[Path]:
    """What to try, best first: what `latest` names, then the others by when they were saved, newest first.

    Those without a readable manifest come last. Raises `CheckpointError` if the directory cannot be read.
    """
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {str(directory)!r}: {error.strerror}") from None
    latest = read_latest(directory)
    if found and latest is not None and not _is_there(directory, latest) and read_latest(directory) == latest:
        warnings.warn(
            f"{str(directory / LATEST)!r} names {shorten(repr(latest))}, which is no checkpoint there: the newest one "
            f"is taken",
            stacklevel=2,
        )
    return sorted(found, key=lambda path: (path.name == latest, _sequence(path), path.name), reverse=True)


def _is_there(directory: Path, name: str) -> bool:
    return _NAME.fullmatch(name) is not None and (directory / name).exists()


def check_own(path: Path) -> None:
    """Raise `DamagedCheckpointError` if what a directory lists as a checkpoint is a link to somewhere else."""
    if path.is_symlink():
        raise DamagedCheckpointError(
            f"{path}: it is a link, and onecopy does not follow links; to load it, give the path to which it points"
        )


def read_latest(directory: Path) -> str | None:
    """The name in `latest`, None if there is none."""
    try:
        return read_plain(directory / LATEST, LONGEST_NAME + 1).decode().strip()
    except (OSError, ValueError):
        return None


def next_sequence(directory: Path) -> int:
    """The number of the next save into ``directory``."""
    newest = max([0, *(_sequence(path) for path in find_checkpoints(directory))])
    # A manifest of a stranger's must not make ours one that cannot be read.
    return min(newest + 1, LARGEST - 1)


def newest_step(directory: Path) -> int:
    """The step of the checkpoint that `load` would try first of those that can be read; 0 if there is none."""
    for path in find_checkpoints(directory):
        with suppress(DamagedCheckpointError):
            check_own(path)
            return read_manifest(path).step
    return 0


def begin(directory: Path, step: int) -> Path:
    """Make an empty place to write a checkpoint of ``step`` in; what earlier crashes left is cleared away."""
    for left in directory.iterdir():
        if left.name.startswith((_SAVING, _REMOVING)):
            remove(left)
    saving = directory / f"{_SAVING}step-{step:08d}"
    saving.mkdir()
    return saving


def make(directory: Path) -> None:
    """Make a directory with all its parents, each of whose names is on the disk when this returns."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def commit(saving: Path, manifest: bytes) -> Path:
    """Make what was written a checkpoint: manifest, name, `latest`, in this order, each on the disk before the next.

    A step that was saved before gets a second name, "step-00000200-2": replacing it could lose both to a crash.

    Returns:
        The checkpoint.
    """
    write_synced(saving / MANIFEST, manifest)
    sync_directory(saving)
    directory = saving.parent
    name = saving.name.removeprefix(_SAVING)
    final, attempt = directory / name, 1
    while os.path.lexists(final):
        attempt += 1
        final = directory / f"{name}-{attempt}"
    saving.rename(final)
    sync_directory(directory)
    moved = directory / f".{LATEST}"
    write_synced(moved, f"{final.name}\n".encode())
    moved.replace(directory / LATEST)
    sync_directory(directory)
    return final


def remove(path: Path) -> None:
    """Delete a directory with all in it. Of a link the link alone is deleted, whatever it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def abandon(saving: Path) -> None:
    """Clear away a checkpoint that could not be finished, as far as that works."""
    shutil.rmtree(saving, ignore_errors=True)


def keep_newest(directory: Path, count: int) -> list[Path]:
    """Delete all but the ``count`` newest checkpoints. Those that are seen to be damaged do not count, and stay.

    Returns:
        What was deleted.
    """
    whole = [path for path in find_checkpoints(directory) if _looks_whole(path)]
    for path in whole[count:]:
        # A name that nobody loads first: half a checkpoint must never be found under a good one.
        removing = directory / f"{_REMOVING}{path.name}"
        path.rename(removing)
        sync_directory(directory)
        shutil.rmtree(removing)
    return whole[count:]


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _looks_whole(path: Path) -> bool:
    # What a link leads to is not this run's to delete.
    if path.is_symlink():
        return False
    try:
        check_sizes(path, read_manifest(path))
    except DamagedCheckpointError:
        return False
    return True


def _sequence(path: Path) -> int:
    with suppress(DamagedCheckpointError):
        return -1 if path.is_symlink() else read_manifest(path).sequence
    return -1
