"""Stores of one model: the files and the memory that `Offload` asks for, with what they hold and move booked."""

from __future__ import annotations

import threading
from functools import partial

from onecopy.memory.store.files import Booked, File
from onecopy.memory.store.offload import HOST, Offload
from onecopy.memory.store.pool import Pool
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter
from onecopy.sharding.bucket.masters import Stores


def make_stores(offload: Offload, meter: Meter, ledger: Ledger) -> Stores:
    """Make each rank's files.

    Raises:
        OffloadError: if a file cannot be made where it is to lie.
    """
    booked = threading.Lock()

    def book(op: str, nbytes: int) -> Booked:
        phase = ledger.phase

        def ended(seconds: float, exposed: float) -> None:
            with booked:
                ledger.record(op, "", "", phase=phase, sent=nbytes, seconds=seconds, exposed=exposed)

        return ended

    files: dict[object, File] = {}

    def file_for(name: str) -> File | None:
        if not offload.on_disk(name):
            return None
        place = offload.directory(name).absolute()
        if place not in files:
            files[place] = File(place, book)
        return files[place]

    def book_copy(op: str, nbytes: int) -> None:
        ledger.record(op, "", "", phase=ledger.phase, sent=nbytes, seconds=0.0, exposed=0.0)

    return Stores(
        booking=book_copy,
        meter=meter,
        optimizer=file_for("optimizer"),
        parameters=file_for("parameters"),
        parameters_on_host=offload.parameters == HOST,
        pool=Pool(partial(meter.add, "communication")),
    )
