"""Metrics: what a run leaves behind. Its directory, metrics.jsonl, TensorBoard events and summary.json."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from onecopy.errors import SettingsError, WriteError


@dataclass(frozen=True)
class Record:
    """Numbers of one step.

    Attributes:
        kind: "train" for a step, "evaluation" for an evaluation after it, "recovery" for a loss made good before it,
            "slow" for a rank that did not answer for a while before it.
        step: counted from 1.
        values: by name. A name "memory/optimizer" is the part "optimizer" of "memory".
        ranks: whom it is about, if not all.
    """

    kind: Literal["train", "evaluation", "recovery", "slow"]
    step: int
    values: Mapping[str, float]
    ranks: tuple[int, ...] = ()


EVENT_VALUES: Final = {
    "recovery": {
        "ranks": "Who was lost and came back.",
        "seconds": "From the moment in which the loss was noticed until all ranks had their slices.",
        "lost_seconds": "What the loss cost: `seconds`, and the work that was done over.",
    },
    "slow": {
        "ranks": "Who did not answer for more than half of `recovery.heartbeat`.",
        "seconds": "For how long.",
        "given_up": "1 if another process took its place, which is a line of kind `recovery` too; 0 if it came back.",
    },
}
"""What `metrics.jsonl` holds of an event, by its kind and by name, and what each value means."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in what goes wrong inside the block.

    Raises:
        WriteError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, readable while the run goes on. What is not finite is null.

    Args:
        after: a run that goes on after this step keeps the lines up to it.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        kept = _lines_until(path, after) if after else []
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._file.writelines(kept)

    def write(self, record: Record) -> None:
        line: dict[str, Any] = {"kind": record.kind, "step": record.step}
        if record.ranks:
            line["ranks"] = list(record.ranks)
        for name, value in record.values.items():
            whole, _, part = name.partition("/")
            if part:
                line.setdefault(whole, {})[part] = _json_number(value)
            else:
                line[name] = _json_number(value)
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "metrics.jsonl was deleted while the run went on")
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars by kind and name. ``after``: as for `JsonLines`."""

    def __init__(self, directory: Path, after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=after + 1 if after else None)

    def write(self, record: Record) -> None:
        for name, value in record.values.items():
            self._writer.add_scalar(f"{record.kind}/{name}", value, record.step)

    def close(self) -> None:
        self._writer.close()


def _json_number(value: Any) -> Any:
    """JSON has no nan and no inf: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of steps up to ``step``; a line that a crash cut short is left out."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    return kept


def make_run_directory(wanted: str) -> Path:
    """Create the run directory; "auto" is a new one below runs/, named by the time.

    Raises:
        SettingsError: if it cannot be created.
    """
    directory = Path(wanted)
    if wanted == "auto":
        # Two runs may start in the same second.
        now = Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        directory, number = now, 1
        while directory.exists():
            number += 1
            directory = now.with_name(f"{now.name}-{number}")
    try:
        directory.mkdir(parents=True, exist_ok=wanted != "auto")
    except OSError as error:
        raise SettingsError(f"cannot create the run directory: {error}; set run.directory") from None
    return directory


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json."""
    file = directory / "summary.json"
    with writing(file):
        numbers = {name: _json_number(value) for name, value in summary.items()}
        file.write_text(json.dumps(numbers, indent=2, allow_nan=False) + "\n", encoding="utf-8")
