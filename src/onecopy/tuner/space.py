"""Space: which settings are tried, as users say it, and all of them one by one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import OFFLOADS, Offload
from onecopy.planner.model.shape import CHECKPOINTING, Checkpointing
from onecopy.stage import Stage
from onecopy.tuner.candidate import Candidate

_LARGEST: Final = 64
"""Samples of the largest micro-batch that is tried where the space names none."""


@dataclass(frozen=True)
class Space:
    """Values of each setting. Every combination that can work is a candidate.

    Attributes:
        stage: 0 to 3.
        micro_batch: samples of one rank at once; None for every divisor of a rank's share, up to 64.
        checkpointing: "off", "selective", "units", "units+cpu"; over tensor ranks "P_a" and "P_a+cpu".
        offload: "none", "optimizer on cpu", "optimizer on nvme", "parameters on cpu", "parameters on nvme".
        replicate: copies of the model states, the shard degree's other side.
        tensor: ranks that share each block.
        prefetch: units gathered ahead.
        bucket_bytes: most bytes of one communication buffer; 0 is the device's default.
        units: "auto", "one", or names of classes or modules with commas between them.
        ranks: how many take part; empty for all that there are.
        states: the directory on a disk that "… on nvme" needs.
    """

    stage: tuple[int, ...] = (0, 1, 2, 3)
    micro_batch: tuple[int, ...] | None = None
    checkpointing: tuple[Checkpointing, ...] = ("off", "units")
    offload: tuple[Offload, ...] = ("none",)
    replicate: tuple[int, ...] = (1,)
    tensor: tuple[int, ...] = (1,)
    prefetch: tuple[int, ...] = (1, 2)
    bucket_bytes: tuple[int, ...] = (0,)
    units: tuple[str, ...] = ("auto",)
    ranks: tuple[int, ...] = ()
    states: str = ""

    def __post_init__(self) -> None:
        for number in self.stage:
            Stage.of(number)
        for name, known in (("checkpointing", CHECKPOINTING), ("offload", OFFLOADS)):
            for value in getattr(self, name):
                if value not in known:
                    close = get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
                    raise SettingsError(
                        f"space.{name} may hold {', '.join(known)}; found {value!r}, did you mean {close!r}?"
                    )
        least = {"micro_batch": 1, "replicate": 1, "tensor": 1, "prefetch": 0, "bucket_bytes": 0, "ranks": 1}
        for name, low in least.items():
            for value in getattr(self, name) or ():
                if isinstance(value, bool) or not isinstance(value, int) or value < low:
                    raise SettingsError(f"space.{name} must hold whole numbers of at least {low}; found {value!r}")
        if any(offload.endswith("nvme") for offload in self.offload) and not self.states:
            raise SettingsError("space.offload names a disk: give the directory that is on it as space.states")

    def candidates(self, ranks: int, global_batch: int) -> list[Candidate]:
        """Every setting of the space, each once.

        Args:
            ranks: that there are.
            global_batch: samples in a step over all ranks.

        Raises:
            SettingsError: if nothing of the space can work; it says why.
        """
        refused: dict[str, None] = {}
        found: dict[Candidate, None] = {}
        for part in self.ranks or (ranks,):
            if part > ranks:
                raise SettingsError(f"space.ranks holds {part}, but there are {ranks}")
            for tensor, replicate in product(self.tensor, self.replicate):
                if part % (tensor * replicate):
                    refused[f"{part} ranks cannot be split into {replicate} copies over {tensor} tensor ranks"] = None
                    continue
                copies = part // tensor
                if global_batch % copies:
                    refused[f"a global batch of {global_batch} cannot be split over {copies} ranks"] = None
                    continue
                for candidate in self._over(part, tensor, replicate, global_batch // copies):
                    found[candidate] = None
        if not found:
            raise SettingsError(
                f"nothing of the space can work: {'; '.join(refused) or 'no micro-batch divides a share of the batch'}"
            )
        return list(found)

    def _over(self, ranks: int, tensor: int, replicate: int, share: int) -> Iterator[Candidate]:
        """Those with that mesh; ``share``: samples of a rank in a step."""
        sizes = self.micro_batch or tuple(range(1, min(share, _LARGEST) + 1))
        for stage, size, checkpointing, offload, prefetch, bucket, units in product(
            self.stage, sizes, self.checkpointing, self.offload, self.prefetch, self.bucket_bytes, self.units
        ):
            kind = Stage.of(stage)
            offloads = offload != "none"
            if (
                share % size
                or (replicate > 1 and not kind.shards_optimizer)
                or (checkpointing.startswith("P_a") and tensor == 1)
                or (offloads and not kind.shards_optimizer)
                or (offload.startswith("parameters") and not kind.shards_parameters)
            ):
                continue
            yield Candidate(
                stage,
                size,
                share // size,
                ranks,
                checkpointing,
                offload,
                replicate,
                tensor,
                # Where nothing is gathered, nothing is gathered ahead: such settings are one.
                prefetch if kind.shards_optimizer and units != "one" else 1,
                bucket,
                units,
            )

    def as_dict(self) -> dict[str, Any]:
        """For the journal, which must know whether it is of the same search."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def space_of(values: dict[str, Any], source: str) -> Space:
    """A space from plain values.

    Args:
        source: where they are from, for errors.

    Raises:
        SettingsError: for a name that is not known, or a value that cannot be.
    """
    known = [field.name for field in fields(Space)]
    for name, value in values.items():
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise SettingsError(f"unknown key {name!r} in {source}; did you mean {close!r}?")
        if name == "states":
            if not isinstance(value, str):
                raise SettingsError(f"states in {source} must be a directory; found {value!r}")
        elif not isinstance(value, list) or not value:
            raise SettingsError(f"{name} in {source} must be a list of values to try; found {value!r}")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Space(**given)


def read_space(path: Path) -> Space:
    """The space of a TOML file: each key of `Space` with a list of values to try.

    Raises:
        SettingsError: if the file cannot be read, or says what cannot be.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read the space {str(path)!r}: {error}") from None
    return space_of(values, str(path))
