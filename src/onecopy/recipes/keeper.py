"""Keeper: the job's checkpoints. When one is due, what goes into it, and where a run goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import onecopy
from onecopy.checkpoint.claim import claim
from onecopy.checkpoint.directory import find_checkpoints
from onecopy.checkpoint.group import Group
from onecopy.errors import SettingsError
from onecopy.recipes.config import Config
from onecopy.recipes.report import plain_console
from onecopy.recipes.schedule import Schedules
from onecopy.recipes.tokenizer import tokenizer_files
from onecopy.recipes.world import World


class Keeper:
    """Saves and resumes one run. Its checkpoints are in the run directory's `checkpoints`.

    Args:
        directory: the run directory. The tokenizer is kept with every checkpoint.

    Attributes:
        last: the checkpoint that was saved or loaded last.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        directory: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedules,
    ) -> None:
        self._settings = config.checkpoint
        self._world = world
        self._directory = directory / "checkpoints"
        trained = directory / "tokenizer"
        self._tokenizer = tokenizer_files(str(trained) if trained.is_dir() else config.data.tokenizer)
        self._model = model
        self._optimizers = optimizers
        self._schedule = schedule
        data = config.data
        # The order of the data depends on these; a run that goes on elsewhere in it would be another one.
        self._order = {
            "run.seed": config.run.seed,
            "data.sequence_length": data.sequence_length,
            "data.batch": data.batch,
        }
        self._saving: onecopy.Saving | None = None
        self.last: Path | None = None

    def resume(self) -> int:
        """Go on from a checkpoint, if the config says so and there is one. Returns the step it is of, else 0.

        From here on no other run may save where this one does.

        Raises:
            CheckpointError: if another run does already; it says which.
            SettingsError: if the data would not go on where it stopped.
        """
        if self._world.is_new:
            # It gets its states from its peers. The next save claims the directory.
            return 0
        if self._settings.save_every:
            Group.current().on_first("beginning a run", lambda: claim(self._directory))
        source = self._source()
        if source is None:
            return 0
        loaded = onecopy.load(source, self._model, self._optimizers, scheduler=self._schedule)
        saved = loaded.extra.get("order") if isinstance(loaded.extra, dict) else None
        if not isinstance(saved, dict) or saved.keys() != self._order.keys():
            raise SettingsError(
                f"{loaded.path} was not saved by onecopy train, so it does not say at which text to continue: load "
                "its weights through model.path instead, or resume from a checkpoint of onecopy train"
            )
        for key, value in self._order.items():
            if saved[key] != value:
                raise SettingsError(
                    f"{loaded.path} was saved with {key} = {saved[key]}, and the order of the data depends on this "
                    f"value; resume with it, not with {value}"
                )
        self.last = loaded.path
        again = "" if loaded.ranks == self._world.size else f", saved by {loaded.ranks} ranks"
        self.say(f"going on from {loaded.path}, step {loaded.step}{again}")
        return loaded.step

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is to be saved, apart from the last one of a run."""
        return bool(self._settings.save_every) and step % self._settings.save_every == 0

    def save(self, step: int) -> None:
        """Save, unless the config wants no checkpoints."""
        if not self._settings.save_every:
            return
        self._saving = onecopy.save(
            self._directory,
            self._model,
            self._optimizers,
            scheduler=self._schedule,
            extra={"order": self._order},
            step=step,
            keep=self._settings.keep,
            background=self._settings.save_in_background,
            assets=self._tokenizer,
        )

    def finish(self) -> str | None:
        """Wait for the last save. Returns where it is."""
        if self._saving is not None:
            self.last = self._saving.wait()
        return None if self.last is None else str(self.last)

    def say(self, words: str) -> None:
        """Tell the person at the terminal, once."""
        if self._world.rank == 0:
            plain_console().print(words, soft_wrap=True)

    def _source(self) -> Path | None:
        resume = self._settings.resume
        if resume != "auto":
            return Path(resume) if resume else None
        found = self._directory.is_dir() and bool(find_checkpoints(self._directory))
        return self._directory if self._world.gather(found)[0] else None
