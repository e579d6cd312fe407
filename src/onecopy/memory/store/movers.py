"""Movers: what carries bytes between one rank's device, host memory and files, for all that a model keeps elsewhere.

States and activations go the same way: one pair of streams for each device, one file with its threads for each
directory, and one pool of memory with one limit. What is held is in the meter, what is moved in the ledger.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import torch

from onecopy.memory.store.copies import Copies
from onecopy.memory.store.files import Booked, File
from onecopy.memory.store.pool import Pool
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter


class Movers:
    """See the file's first lines.

    Args:
        meter: where the pool's memory is counted, as that of buffers is.
        ledger: where transfers are booked: "to host", "from host", "to disk", "from disk".

    Attributes:
        pool: memory into which pages are brought.
    """

    def __init__(self, meter: Meter, ledger: Ledger) -> None:
        self.pool = Pool(partial(meter.add, "communication"))
        self._ledger = ledger
        self._files: dict[Path, File] = {}
        self._copies: dict[torch.device, Copies] = {}
        self._booked = threading.Lock()

    def __deepcopy__(self, memo: object) -> Movers:
        """Itself: what a copy of a module keeps goes the same way."""
        return self

    def file(self, directory: Path) -> File:
        """The file in ``directory``, which is made at the first call.

        Raises:
            OffloadError: if it cannot be made there.
        """
        place = directory.absolute()
        if place not in self._files:
            self._files[place] = File(place, self._book_transfer)
        return self._files[place]

    def copies(self, device: torch.device) -> Copies:
        """What copies between ``device``, an accelerator, and host memory."""
        if device not in self._copies:
            self._copies[device] = Copies(device, self._book_copy)
        return self._copies[device]

    def _book_copy(self, op: str, nbytes: int) -> None:
        self._ledger.record(op, "", "", phase=self._ledger.phase, sent=nbytes, seconds=0.0, exposed=0.0)

    def _book_transfer(self, op: str, nbytes: int) -> Booked:
        phase = self._ledger.phase

        def ended(seconds: float, exposed: float) -> None:
            with self._booked:
                self._ledger.record(op, "", "", phase=phase, sent=nbytes, seconds=seconds, exposed=exposed)

        return ended
