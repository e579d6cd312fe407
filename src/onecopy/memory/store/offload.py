"""Offload: what users say about where model states rest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onecopy.errors import SettingsError
from onecopy.stage import Stage

HOST: Final = "cpu"
"""The name of host memory."""

_NO_DIRECTORY: Final = ("", "gpu", "cuda", "device", "host", "ram", "disk", "nvme", "ssd")
"""Words that people write for a place, and that name none."""

Where = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Words:
    """How errors name the settings: as the call has them; a file of settings has names of its own."""

    optimizer: str = "Offload(optimizer=)"
    parameters: str = "Offload(parameters=)"
    prefetch: str = "Offload(prefetch=)"
    stage: str = "stage="
    device: str = "None"
    """The value for states that stay on the device."""

    def of(self, name: str) -> str:
        """Of the setting that `Offload` calls ``name``."""
        word: str = getattr(self, name)
        return word


@dataclass(frozen=True)
class Offload:
    """Where model states are kept while they are not computed with (ZeRO-Offload, ZeRO-Infinity).

    The result equals, to the last bit, that of the same run without offload.

    Attributes:
        optimizer: where masters, optimizer states and gradients are kept. "cpu": in host memory. The path of a
            directory: each rank keeps one file without a name there. None: on the device.
        parameters: where stage 3 keeps the slices that it gathers, in the compute dtype: "cpu", a directory, or None
            for the device.
        prefetch: how many units to fetch ahead of the one that computes, if ``parameters`` is given.
    """

    optimizer: Where = None
    parameters: Where = None
    prefetch: int = 1

    def check(self, stage: Stage, words: Words | None = None) -> None:
        """Raise `SettingsError` for what cannot work, saying what would. Nothing is made or written yet."""
        words = words or Words()
        for name in ("optimizer", "parameters"):
            _check_place(words.of(name), getattr(self, name), words)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise SettingsError(f"{words.prefetch} must be a whole number of at least 0; found {self.prefetch!r}")
        if self.optimizer is None and self.parameters is None:
            raise SettingsError(
                f"neither {words.optimizer} nor {words.parameters} names a place, so nothing is moved: say where "
                f'optimizer states rest, "cpu" or a directory, or leave offload away'
            )
        if not stage.shards_optimizer:
            raise SettingsError(
                f"offload moves slices, but stage {stage.number} has none: take stage 1, 2 or 3, also on one rank"
            )
        if self.parameters is None:
            if self.prefetch != 1:
                raise SettingsError(
                    f"{words.prefetch} is {self.prefetch} and fetches offloaded parameters ahead, but parameters are "
                    f"on the device: give {words.parameters} too, or shard(prefetch=), which is for gathers"
                )
            return
        if not stage.shards_parameters:
            raise SettingsError(
                f"{words.parameters} needs stage 3, because at stage {stage.number} whole parameters stay on the "
                f"device through a step. Take {words.stage} 3, or leave {words.parameters} away"
            )
        if self.optimizer is None:
            raise SettingsError(
                f"{words.parameters} is {os.fspath(self.parameters)!r}, but the masters, which are larger, stay on "
                f"the device: give {words.optimizer} too"
            )
        if self.on_disk("parameters") and not self.on_disk("optimizer"):
            raise SettingsError(
                f"{words.parameters} is {os.fspath(self.parameters)!r}, which keeps parameters on disk and masters, "
                f"which are larger, in host memory: give {words.optimizer} a directory too"
            )

    @property
    def kinds(self) -> tuple[str, str]:
        """Kinds of store, of which all ranks need the same; their directories may differ."""
        first, second = (
            "files" if self.on_disk(name) else str(getattr(self, name)) for name in ("optimizer", "parameters")
        )
        return first, second

    def on_disk(self, name: str) -> bool:
        """Whether the setting ``name`` is a directory."""
        return getattr(self, name) not in (None, HOST)

    def directory(self, name: str) -> Path:
        """The directory that the setting ``name`` is."""
        return Path(getattr(self, name))


def _check_place(setting: str, place: Where, words: Words) -> None:
    if place is None or place == HOST:
        return
    word = place.lower() if isinstance(place, str) else place
    if not isinstance(place, str | os.PathLike) or word in (HOST, *_NO_DIRECTORY):
        raise SettingsError(f'{setting} must be {words.device}, "cpu" or the path of a directory; found {place!r}')
    path = Path(place)
    if path.parts[:1] == ("~",):
        raise SettingsError(f"{setting} is {str(path)!r}, but ~ is not expanded here: give the whole path")
    if path.exists() and not path.is_dir():
        raise SettingsError(f"{setting} is {str(path)!r}, which is not a directory; give the path of one")
