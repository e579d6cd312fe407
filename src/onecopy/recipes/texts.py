"""Texts: documents read from .txt, .jsonl and .parquet files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from onecopy.errors import SettingsError

SUFFIXES: Final = (".txt", ".jsonl", ".parquet")


@dataclass
class Found:
    """What was read.

    Attributes:
        files: those that held text.
        documents: in them.
        empty: files without any text.
        ignored: files in data directories whose names end in none of `SUFFIXES`.
    """

    files: int = 0
    documents: int = 0
    empty: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def ignored_files(paths: Sequence[str]) -> list[str]:
    """Files in directories among ``paths`` that `find_files` passes over: of other kinds, and no hidden ones."""
    return [
        str(file)
        for path in map(Path, paths)
        if path.is_dir()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.suffix not in SUFFIXES and not file.name.startswith(".")
    ]


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that ``paths`` stand for; a directory stands for all in it, at any depth, in order of their names.

    Raises:
        SettingsError: if a path does not exist, is of another kind, or is a directory without such files.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not inside:
                raise SettingsError(f"the data directory {str(path)!r} holds no {', '.join(SUFFIXES)} file")
            found += inside
        elif not path.is_file():
            raise SettingsError(f"there is no data file or directory {str(path)!r}")
        elif path.suffix not in SUFFIXES:
            raise SettingsError(f"data files must end in {', '.join(SUFFIXES)}; found {str(path)!r}")
        else:
            found.append(path)
    return found


def read_documents(paths: Sequence[str], text_field: str, found: Found | None = None) -> Iterator[str]:
    """The documents of ``paths`` in order; without paths, Python's documentation from the standard library.

    Args:
        paths: files or directories, see `find_files`.
        text_field: which field of a .jsonl or .parquet row is the text.
        found: counts what is read.

    Raises:
        SettingsError: if a file cannot be read as its name says, or a row has no such text.
    """
    found = found if found is not None else Found()
    if not paths:
        from pydoc_data.topics import topics

        for name in sorted(topics):
            found.documents += 1
            yield topics[name]
        return
    found.ignored += ignored_files(paths)
    for file in find_files(paths):
        documents = 0
        for text in _read(file, text_field):
            if text.strip():
                documents += 1
                yield text
        found.files += bool(documents)
        found.documents += documents
        if not documents:
            found.empty.append(str(file))


def _read(file: Path, text_field: str) -> Iterator[str]:
    try:
        match file.suffix:
            case ".txt":
                yield file.read_text(encoding="utf-8")
            case ".jsonl":
                yield from _read_jsonl(file, text_field)
            case _:
                yield from _read_parquet(file, text_field)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8 text: {error}") from None


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SettingsError(f"{file}:{number} is not a line of JSON: {error}") from None
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                has = f"fields {sorted(row)}" if isinstance(row, dict) else type(row).__name__
                raise SettingsError(f"{file}:{number} has no text in field {field!r}, but {has}; set data.text_field")
            yield text


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise SettingsError(f"{file} is not a Parquet file: {error}") from None
    with table:
        if field not in table.schema_arrow.names:
            names = sorted(table.schema_arrow.names)
            raise SettingsError(f"{file} has no column {field!r} but {names}; set data.text_field")
        for rows in table.iter_batches(columns=[field]):
            for text in rows.column(0).to_pylist():
                if not isinstance(text, str):
                    raise SettingsError(f"column {field!r} of {file} must hold text; found {text!r}")
                yield text
