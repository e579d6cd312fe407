"""Values: plain values and tensors in torch.save's format, of which a stranger may have written the bytes.

Nothing in them can run code: torch reads them with `weights_only`, and the metadata of a checkpoint is read by a closed
list of classes (`metadata.py`). And nothing in them takes more memory than the file has bytes: an archive is not
compressed, and a pickle's numbers of places and lengths lie within it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import torch

from onecopy.untrusted import Refused, reason, walk

_NO_ARGUMENT: Final = 0
_UP_TO_NEWLINE: Final = -1
_LENGTH_BYTES: Final = {-2: 1, -3: 4, -4: 4, -5: 8}
"""Bytes of the length that comes before an argument, by pickletools' number for its kind."""

_ARGUMENTS: Final = {ord(op.code): op.arg.n if op.arg else _NO_ARGUMENT for op in pickletools.opcodes}
_PLACES: Final = {ord("r"): 4, ord("q"): 1}
"""LONG_BINPUT and BINPUT: into which place of a table, grown to that size, a value is put."""
_TEXT_PLACE: Final = ord("p")
_FRAME: Final = ord("\x95")
_STOP: Final = ord(".")
_GLOBAL: Final = ord("c")
_BY_EXTENSION: Final = {ord("\x82"), ord("\x83"), ord("\x84")}
_LONGEST_COUNT: Final = 20
_ALLOCATING: Final = {b"builtins\nbytearray", b"__builtin__\nbytearray"}
"""What torch would call with a number of bytes to make and fill."""


def load_values(source: BinaryIO | Path, *, mmap: bool = False, stand_ins: Sequence[Any] = ()) -> Any:
    """What `torch.save` wrote.

    Args:
        source: a file open for reading; or a path, of a plain file.
        mmap: map tensors instead of reading them; needs a path.
        stand_ins: pairs of a class and the full name of another, as which it is read.

    Raises:
        Refused: if it is not that, could run code, or would take more memory than it has bytes.
        OSError: if it cannot be read.
    """
    with open(source, "rb") if isinstance(source, Path) else io.BytesIO() as opened:
        check_archive(opened if isinstance(source, Path) else source)
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            value = torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise Refused(reason(error)) from None
    except (EOFError, AssertionError, RecursionError, MemoryError, OverflowError) as error:
        raise Refused(reason(error)) from None
    for found in walk(value):
        if isinstance(found, torch.Tensor) and found.numel() * found.itemsize > found.untyped_storage().nbytes():
            raise Refused(f"it holds a tensor of shape {tuple(found.shape)} with fewer bytes than its elements need")
    return value


def check_archive(file: IO[bytes]) -> None:
    """Raise `Refused` unless a file is an uncompressed archive of torch.save. Leaves it at its start."""
    try:
        size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
                raise Refused("parts of it are compressed, which torch.save does not do")
            if sum(member.file_size for member in members) > size:
                raise Refused("its parts are larger than the whole")
            for member in members:
                if member.filename.endswith(".pkl"):
                    check_pickle(archive.read(member))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError) as error:
        raise Refused(str(error) if isinstance(error, Refused) else "it is not what torch.save writes") from None
    file.seek(0)


def check_pickle(content: bytes) -> None:
    """Raise `Refused` if unpickling would take memory that the pickle has no bytes for.

    Python grows its table of values to the number that an instruction names, and makes room for a string before it
    reads one: five bytes could ask for gigabytes.
    """
    position, end, steps = 0, len(content), 0
    arguments, places = _ARGUMENTS, _PLACES
    while position < end:
        code = content[position]
        argument = arguments.get(code)
        position += 1
        steps += 1
        if argument is None or code in _BY_EXTENSION:
            raise Refused("its pickle has an instruction that no checkpoint needs")
        if argument >= 0:
            if code in places and int.from_bytes(content[position : position + argument], "little") > steps:
                raise Refused("its pickle numbers its values beyond their count")
            if code == _FRAME and int.from_bytes(content[position : position + argument], "little") > end:
                raise Refused("its pickle is cut short")
            position += argument
        elif argument == _UP_TO_NEWLINE:
            start = position
            for _ in range(2 if code in (_GLOBAL, ord("i")) else 1):
                position = content.find(b"\n", position) + 1
                if not position:
                    raise Refused("its pickle is cut short")
            if code == _GLOBAL and content[start : position - 1] in _ALLOCATING:
                name = content[start : position - 1].decode().replace("\n", ".")
                raise Refused(f"it asks for {name}, which no checkpoint needs")
            if code == _TEXT_PLACE and not _is_count(content[start : position - 1], steps):
                raise Refused("its pickle numbers its values beyond their count")
        else:
            width = _LENGTH_BYTES[argument]
            position += width + int.from_bytes(content[position : position + width], "little")
            if position > end:
                raise Refused("its pickle is cut short")
        if code == _STOP:
            return
    raise Refused("its pickle is cut short")


def _is_count(digits: bytes, most: int) -> bool:
    return digits.isdigit() and len(digits) < _LONGEST_COUNT and int(digits) <= most
