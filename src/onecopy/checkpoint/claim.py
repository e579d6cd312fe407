"""Claim: a directory of checkpoints has one writer, the run that saved into it first and has not ended.

The first rank holds a lock of the kernel's on `.writer`, which goes when its process ends, however that ends. What
the file says, who holds it, is for the run that comes second; it stays when the lock is gone and means nothing then.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from onecopy.checkpoint.directory import make
from onecopy.errors import CheckpointError
from onecopy.untrusted import printable, read_json, shorten

WRITER: Final = ".writer"

_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)

_claims: Final[dict[Path, _Claim]] = {}


def claim(directory: Path) -> None:
    """Make this process the writer of a directory, which is made, until it ends. The first rank calls it at each save.

    Raises:
        CheckpointError: if another process is, or the directory is no longer the one that was claimed.
        OSError: if it cannot be written.
    """
    place = directory.resolve()
    held = _claims.get(place)
    # A fork has the record of its parent's lock, and not the lock.
    if held is None or held.process != os.getpid():
        make(directory)
        _claims[place] = _Claim(place)
    else:
        held.check()


def release(directory: Path) -> None:
    """End this process's claim: nothing more is saved into the directory, or it may be deleted and made anew."""
    held = _claims.pop(directory.resolve(), None)
    if held is not None and held.process == os.getpid():
        held.close()


class _Claim:
    def __init__(self, directory: Path) -> None:
        self.process = os.getpid()
        self._path = directory / WRITER
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._handle = os.open(self._path, flags, 0o644)
        try:
            self._lock(directory)
        except BaseException:
            os.close(self._handle)
            raise
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(_identity()).encode(), 0)

    def close(self) -> None:
        os.close(self._handle)

    def check(self) -> None:
        """Raise `CheckpointError` if the directory was deleted or replaced since."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._handle)):
                return
        raise CheckpointError(
            f"{str(self._path.parent)!r} was deleted or replaced while this run saved into it, and its earlier "
            "checkpoints are gone: start the run again with a directory that stays"
        )

    def _lock(self, directory: Path) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            # Not flock, which forked workers would go on holding.
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(
                    f"another run saves into {str(directory)!r}: {_holder(self._path)}. End that run, or give this "
                    "run a directory of its own"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"the file system of {str(directory)!r} has no locks: take care that no other run saves there",
                stacklevel=2,
            )


def _identity() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shorten(" ".join(sys.argv)),
    }


def _holder(path: Path) -> str:
    try:
        found = read_json(path)
        return printable(f"process {found['process']} on {found['host']} since {found['since']} ({found['command']})")
    except (OSError, ValueError, TypeError, KeyError):
        return "a process that has not written its name yet"
