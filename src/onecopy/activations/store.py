"""Store: where the kept parts of activation checkpoints lie between forward and backward.

============  ======================================  ============================================================
``None``      the device                              nothing is moved (`kept.py`)
``"cpu"``     host memory                             on the same streams as offloaded states (`host.py`)
a directory   one file, that of states in it too      by the same threads, through the same pool of memory (`disk.py`)
============  ======================================  ============================================================
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from onecopy.activations.disk import OnDisk
from onecopy.activations.host import InHostMemory
from onecopy.activations.kept import OnDevice, Store
from onecopy.errors import SettingsError
from onecopy.memory.store.movers import Movers
from onecopy.observe.meter import Meter


def make_store(offload: str | os.PathLike[str] | None, meter: Meter, movers: Movers) -> Store:
    """The store of that name: None, "cpu" or a directory, which is made if there is none.

    Args:
        movers: those of states too.

    Raises:
        SettingsError: if it is none of these, or the directory cannot be written to.
        OffloadError: if no file can be made in the directory.
    """
    check_offload(offload)
    if offload is None:
        return OnDevice(meter)
    if offload == "cpu":
        return InHostMemory(meter, movers)
    return OnDisk(movers.file(Path(offload)), movers.pool, meter)


def check_offload(offload: str | os.PathLike[str] | None) -> None:
    """Raise `SettingsError` if there is no such store. Makes a directory that is missing."""
    if offload is None or offload == "cpu":
        return
    if not isinstance(offload, str | os.PathLike) or offload in ("gpu", "cuda", "disk", "nvme", ""):
        raise SettingsError(f'offload must be None, "cpu" or the path of a directory; found {offload!r}')
    path = Path(offload)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SettingsError(f"offload cannot write to {str(path)!r}: {error}; give a directory that it can") from None
