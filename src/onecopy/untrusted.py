"""Untrusted: files that a stranger may have written, opened and read so that they can harm nobody.

A name in such a file is that of a plain file beside it, never a path. A link, a device or a fifo is refused before it
is opened: following one could copy a private file, or wait for ever. Text is bounded in size and depth before it is
parsed.

Whoever reads checkpoints, model directories and run directories goes through here. What is refused is a `Refused`,
whose words each caller puts behind the name of the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, Final

LONGEST_NAME: Final = 255
"""Bytes that a file's name may have, as on most file systems."""

LARGEST_JSON: Final = 1 << 26
"""Bytes of JSON that are parsed. The index of a model of 100,000 tensors has about a tenth."""

DEEPEST: Final = 64
"""Levels of lists and dicts in each other. What onecopy and transformers write has fewer than ten."""

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LONGEST_REASON: Final = 300


class Refused(ValueError):
    """A file, or a name in it, is not one that is read. The message says why."""


def plain_name(name: object) -> str:
    """``name``, if it is that of a file in the same directory.

    Raises:
        Refused: if it is a path, names a directory, or is no name at all.
    """
    if not isinstance(name, str) or not name or len(os.fsencode(name)) > LONGEST_NAME:
        raise Refused(f"it names a file {shorten(repr(name))}, which is no name")
    if name in (".", "..") or any(character in name for character in "/\\\0"):
        raise Refused(f"it names a file {name!r}, which is not one beside it")
    if _CONTROL.search(name):
        raise Refused(f"it names a file {name!r}, which would forge lines of a terminal")
    return name


def plain_size(path: Path) -> int:
    """The bytes of a plain file.

    Raises:
        Refused: if it is a link, a directory, a device, a fifo or a socket.
        OSError: if there is none.
    """
    return _plain(path.lstat())


def _plain(status: os.stat_result) -> int:
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    found = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    raise Refused(f"it is {found}, and only plain files are read")


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading. Errors as of `plain_size`."""
    plain_size(path)
    # Somebody may replace it between the two calls: then the second one neither follows a link nor waits for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _plain(os.fstat(file.fileno()))
    except Refused:
        file.close()
        raise
    return file


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of a plain file that has at most ``most``. Errors as of `plain_size`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise Refused(f"it has {size:,} bytes, and at most {most:,} are read")
        return file.read(most)


def read_json(path: Path, *, follow: bool = False) -> Any:
    """What a JSON file holds.

    Args:
        follow: take what a link leads to; for directories of the user's own, such as a cache of models.

    Raises:
        Refused: if it is no plain file, not UTF-8, not JSON, too large or too deep.
        OSError: if it cannot be read.
    """
    return parse_json(read_plain(path.resolve() if follow else path, LARGEST_JSON))


def parse_json(content: bytes) -> Any:
    """What JSON says.

    Raises:
        Refused: if it is not UTF-8, not JSON, deeper than `DEEPEST`, or holds half a surrogate pair.
    """
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b'""', content)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > DEEPEST:
            raise Refused(f"its lists and tables are more than {DEEPEST} levels deep")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(f"it is not JSON: {reason(error)}") from None
    if _SURROGATE.search(content):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused("it holds half a character, which can be neither written nor shown") from None
    return found


def walk(value: Any) -> Iterator[Any]:
    """All that lies in lists, tuples and dicts, themselves among it. Raises `Refused` beyond `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST):
        yield from level
        inside = (inner for outer in level if isinstance(outer, list | tuple | dict) for inner in _inside(outer))
        # What lies there several times is looked into once, or a few bytes could ask for an endless walk.
        level = list({id(inner): inner for inner in inside}.values())
        if not level:
            return
    raise Refused(f"its values are more than {DEEPEST} levels deep")


def _inside(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterable[Any]:
    return (*value, *value.values()) if isinstance(value, dict) else value


def reason(error: BaseException) -> str:
    """One sentence of what went wrong, without torch's advice to read a file in a way that could run code."""
    text = str(error)
    if isinstance(error, Refused):
        return text
    if isinstance(error, UnpicklingError) and "eights" in text:
        found = re.search(r"GLOBAL ([\w.]+)", text)
        return f"it holds {found[1]}, which could run code" if found else "it holds more than plain values and tensors"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = text.strip().splitlines()
    return shorten(lines[0], _LONGEST_REASON) if lines else type(error).__name__


def shorten(text: str, most: int = 80) -> str:
    """As much of a text as a message has room for."""
    return text if len(text) <= most else f"{text[:most]}..."


def printable(text: str) -> str:
    """A text in which nothing moves a terminal's cursor or turns the direction of writing."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
