"""Stores of one model: where `Offload` says that its slices rest, and what carries them there."""

from __future__ import annotations

from onecopy.memory.store.files import File
from onecopy.memory.store.movers import Movers
from onecopy.memory.store.offload import HOST, Offload
from onecopy.observe.meter import Meter
from onecopy.sharding.bucket.masters import Stores


def make_stores(offload: Offload, movers: Movers, meter: Meter) -> Stores:
    """Make each rank's files.

    Raises:
        OffloadError: if a file cannot be made where it is to lie.
    """

    def file_for(name: str) -> File | None:
        return movers.file(offload.directory(name)) if offload.on_disk(name) else None

    return Stores(
        optimizer=file_for("optimizer"),
        parameters=file_for("parameters"),
        parameters_on_host=offload.parameters == HOST,
        meter=meter,
        movers=movers,
    )
