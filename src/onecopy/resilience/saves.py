"""Saves: the checkpoints of a run, for the losses that peers' memory cannot make good."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.optim.optimizer import Optimizer

from onecopy.checkpoint.directory import find_checkpoints
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.comm.mesh import Axis
from onecopy.errors import UsageError
from onecopy.resilience.capsules import Belongings

_EXTRA: Final = "onecopy.resilient"
"""Under this name a checkpoint holds what users keep."""

_log = logging.getLogger("onecopy")


class Saves:
    """See the file's first line.

    Args:
        directory: of the checkpoints; None: there are none.
        every: steps between two of them; 0: none but those that users ask for.
        keep: how many stay.

    Attributes:
        newest: steps that the last one has, in whose making this rank took part to the end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        belongings: Belongings,
        *,
        scheduler: Any,
        scaler: Any,
        directory: Path | None,
        every: int,
        keep: int,
    ) -> None:
        self.newest = 0
        self._model, self._optimizer, self._belongings = model, optimizer, belongings
        self._scheduler, self._scaler = scheduler, scaler
        self._directory, self._every, self._keep = directory, every, keep

    def load(self, world: Axis) -> None:
        """Load the newest one, if there is any; every rank calls it."""
        directory = self._directory
        if directory is None or not world.exchange_objects(directory.is_dir() and bool(find_checkpoints(directory)))[0]:
            return
        loaded = load(directory, self._model, self._optimizer, scheduler=self._scheduler, scaler=self._scaler)
        self.newest = loaded.step
        if isinstance(loaded.extra, dict) and _EXTRA in loaded.extra:
            self._belongings.restore(loaded.extra[_EXTRA])
        _log.warning("going on from %s, step %d", loaded.path, loaded.step)

    def is_due(self, steps: int) -> bool:
        """Whether one is to be made after so many steps."""
        return bool(self._directory and self._every and steps != self.newest and steps % self._every == 0)

    def save(self, steps: int) -> None:
        """Make one; every rank calls it.

        Raises:
            UsageError: if there is no directory for it.
        """
        if self._directory is None:
            raise UsageError("run.save() needs onecopy.resilient(..., checkpoints=directory)")
        snapshot = self._belongings.snapshot()
        save(
            self._directory,
            self._model,
            self._optimizer,
            scheduler=self._scheduler,
            scaler=self._scaler,
            step=steps,
            keep=self._keep,
            extra={_EXTRA: {key: snapshot[key] for key in ("groups", "kept")}},
        )
        self.newest = steps
