"""Journal: every probe of a search, a line each, written as soon as it has ended. The same search goes on from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onecopy.errors import SettingsError, WriteError
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.outcome import Outcome


class Journal:
    """A file of probes.

    Args:
        path: made, with its directory, if it is not there.
        identity: what the probes are of; values that JSON has. Space, budget and objective are no part of it: probes
            stay true when these change.

    Attributes:
        known: probes of before.
        machine: what `keep_machine` was given then; None if it was not.

    Raises:
        SettingsError: if the file is of another search, or no journal.
        WriteError: if it cannot be written.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self.machine: dict[str, Any] | None = None
        header = json.loads(json.dumps({"tuning": identity}))
        self.known = self._read(header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if not self._file.tell():
                self._write(header)
            elif not path.read_bytes().endswith(b"\n"):
                # The last line was cut when a process or machine went down; what it said is measured again.
                self._file.write("\n")
        except OSError as error:
            raise WriteError(f"cannot write {str(path)!r}: {error.strerror}") from None

    def _read(self, header: dict[str, Any]) -> list[tuple[Candidate, Outcome]]:
        if not self._path.exists():
            return []
        try:
            first, *lines = self._path.read_text(encoding="utf-8").splitlines() or [""]
            found = json.loads(first) if first else header
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{str(self._path)!r} is no journal of probes: {error}; give another directory"
            ) from None
        if found != header:
            names = sorted(
                name
                for name in header["tuning"]
                if not isinstance(found, dict) or found.get("tuning", {}).get(name) != header["tuning"][name]
            )
            raise SettingsError(
                f"{str(self._path)!r} holds probes of something else ({', '.join(names)} differ); give another "
                f"directory, or delete it to start anew"
            )
        known = []
        for line in lines:
            try:
                row = json.loads(line)
                if "machine" in row:
                    self.machine = row["machine"]
                    continue
                known.append((Candidate.from_dict(row["candidate"]), Outcome.from_dict(row["outcome"])))
            except (ValueError, KeyError, TypeError):
                # A line that was cut.
                continue
        return known

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Keep a probe; it is on the disk when this returns.

        Raises:
            WriteError: if it cannot be written.
        """
        self._append({"candidate": candidate.as_dict(), "outcome": outcome.as_dict()})

    def keep_machine(self, machine: dict[str, Any]) -> None:
        """Keep what was found of the machine, from which corrections are counted. Raises as `add` does."""
        self._append({"machine": machine})

    def _append(self, row: dict[str, Any]) -> None:
        try:
            self._write(row)
        except OSError as error:
            raise WriteError(f"cannot write {str(self._path)!r}: {error.strerror}") from None

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
