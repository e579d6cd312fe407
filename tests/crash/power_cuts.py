"""Power cuts, replayed: the system calls of saves are traced, and every moment of the trace is made into a disk.

    python tests/crash/power_cuts.py --cuts 2000

Two ranks save 1, 2, 3, ... with keep = 1 into a directory that is new, parents included, under strace. The trace is
then replayed as far as a chosen call into a model of a disk: what was synced is there, and of what was not, nothing,
all, or a part chosen by chance. What is left is written out and loaded. Oracle: what rank 0 had been told was saved
before that call (it makes a directory for each): that or a later one must load, whole, and nothing may look damaged.

The model is harsher than file systems are: a new file's name needs a sync of its directory, names of different
directories reach the disk in any order, and of the bytes of a file that was not synced any number may be missing.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# What every rank would otherwise import for itself, which takes seconds.
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import crash_kills
import onecopy
from ranks import run_ranks

CALLS = "openat,mkdir,mkdirat,write,pwrite64,writev,ftruncate,fsync,fdatasync,rename,renameat,unlink,unlinkat,rmdir"
SAVES = 4


# --- what is traced


def save_several(place: Path) -> None:
    """The traced program: each finished checkpoint is kept elsewhere too, for its bytes."""

    def run(rank: int) -> None:
        model = crash_kills._model(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        directory = place / "disk" / "new" / "parents" / "c"
        for value in range(1, SAVES + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(value))
            path = onecopy.save(directory, model, optimizer, step=value, extra=value, keep=1).wait()
            if rank == 0:
                shutil.copytree(path, place / "kept" / path.name)
                (place / "told" / str(value)).mkdir(parents=True)

    (place / "disk").mkdir()
    run_ranks(2, run)


def trace(place: Path) -> list[str]:
    """The lines that strace writes of `save_several`."""
    command = ["strace", "-f", "-y", "-qq", "-s", "1", "-e", f"trace={CALLS}", "-o", str(place / "trace")]
    program = [sys.executable, str(Path(__file__)), "--traced", str(place)]
    subprocess.run([*command, *program], check=True, timeout=300)
    return (place / "trace").read_text(errors="replace").splitlines()


# --- the trace as calls


@dataclass(frozen=True)
class Call:
    """One system call that succeeded: its name, the paths that it is about, and its number of bytes or flags."""

    name: str
    paths: tuple[str, ...]
    count: int = 0
    flags: str = ""


_LINE = re.compile(r"(\d+) +(.*)")
_HANDLE = re.compile(r"(?:\d+|AT_FDCWD)<((?:[^>\\]|\\.)*)>")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def calls(lines: list[str]) -> Iterator[Call]:
    """The calls in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        thread, text = found[1], found[2]
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            text = begun.pop(thread, "") + text[resumed.end() :]
        head, separator, result = text.rpartition(" = ")
        if not separator or result.startswith("-1") or "(" not in head:
            continue
        yield from _call(head, result)


def _call(head: str, result: str) -> Iterator[Call]:
    name, _, arguments = head.partition("(")
    handles = [_unquote(path) for path in _HANDLE.findall(arguments)]
    strings = [_unquote(text) for text in _STRING.findall(arguments)]
    base = handles[0] if handles else os.getcwd()
    number = int(re.match(r"\d+", result)[0])  # type: ignore[index]
    if name == "openat":
        path = _HANDLE.search(result)
        yield Call("open", (_unquote(path[1]) if path else os.path.join(base, strings[0]),), flags=arguments)
    elif name in ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate"):
        if handles:
            size = int(arguments.rpartition(",")[2].rstrip(") ")) if name == "ftruncate" else number
            yield Call({"fdatasync": "fsync", "writev": "write"}.get(name, name), (handles[0],), size)
    elif name.startswith("rename"):
        bases = handles if len(handles) == 2 else [os.getcwd()] * 2
        yield Call("rename", tuple(os.path.join(b, s) for b, s in zip(bases, strings, strict=True)))
    elif name in ("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"):
        yield Call("make" if name.startswith("mkdir") else "remove", (os.path.join(base, strings[0]),))


def _unquote(text: str) -> str:
    return str(ast.literal_eval(f'"{text}"')) if "\\" in text else text


# --- a disk


@dataclass
class File:
    """How many of its bytes were written, and how many were synced. ``origin`` says which file's bytes they are."""

    origin: str = ""
    written: int = 0
    synced: int = 0


@dataclass
class Folder:
    """What is in it for programs, what is on the disk, and the changes between the two, in order."""

    there: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)
    pending: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        how(self.there)
        self.pending.append(how)


class Disk:
    """Follows calls below ``root``, which itself is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = Folder()
        self._prefix = f"{root}/"
        self._latest = 0

    def apply(self, call: Call) -> bool:
        """Take a call. Returns whether it is about this disk."""
        paths = [path for path in call.paths if path.startswith(self._prefix)]
        if not paths:
            return bool(call.name == "fsync" and call.paths[0] == self._prefix[:-1] and self._sync(self.root))
        folder, name = self._find(paths[0])
        there = folder.there.get(name)
        if call.name == "open":
            if "O_CREAT" in call.flags and there is None:
                self._latest += name == ".latest"
                made = File(f"{paths[0]}#{self._latest}" if name == ".latest" else paths[0])
                folder.change(lambda names, n=name, f=made: names.__setitem__(n, f))  # type: ignore[misc]
            elif "O_TRUNC" in call.flags and isinstance(there, File):
                there.written = there.synced = 0
        elif call.name == "make":
            new = Folder()
            folder.change(lambda names, n=name, f=new: names.__setitem__(n, f))  # type: ignore[misc]
        elif call.name == "remove":
            folder.change(lambda names, n=name: names.pop(n, None))  # type: ignore[misc]
        elif call.name == "rename":
            target, new_name = self._find(paths[1])
            assert target is folder, "only renames within a directory are known to be one change"

            def rename(names: dict[str, Any], old: str = name, new: str = new_name) -> None:
                if old in names:
                    names[new] = names.pop(old)

            folder.change(rename)
        elif call.name == "fsync":
            return self._sync(there)
        elif isinstance(there, File):
            there.written = call.count if call.name == "ftruncate" else there.written + call.count
        return True

    def _find(self, path: str) -> tuple[Folder, str]:
        *parents, name = path.removeprefix(self._prefix).split("/")
        folder = self.root
        for parent in parents:
            folder = folder.there[parent]
        return folder, name

    def _sync(self, what: Any) -> bool:
        if isinstance(what, File):
            what.synced = what.written
        elif isinstance(what, Folder):
            what.synced, what.pending = dict(what.there), []
        return True

    def cut(self, out: Path, content: Callable[[str], bytes], share: Callable[[], float]) -> None:
        """Write out what a power cut leaves: of what is not synced, a share between 0 and 1, asked for each time."""
        self._write(self.root, out, content, share)

    def _write(self, folder: Folder, out: Path, content: Callable[[str], bytes], share: Callable[[], float]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        names = dict(folder.synced)
        for change in folder.pending[: round(share() * len(folder.pending))]:
            change(names)
        for name, what in names.items():
            if isinstance(what, Folder):
                self._write(what, out / name, content, share)
            else:
                size = what.synced + round(share() * (what.written - what.synced))
                (out / name).write_bytes(content(what.origin)[:size].ljust(size, b"\0"))


# --- cuts


@dataclass
class Tally:
    """How many calls were replayed, how many disks were loaded, and how many of them had a newer one than was told."""

    calls: int = 0
    cuts: int = 0
    newer: int = 0
    empty: int = 0


def replay(place: Path, lines: list[str], cuts: int, seed: int = 0) -> Tally:
    """Cut the power at so many moments, spread evenly over the calls, in three ways each; load what is left.

    Raises:
        AssertionError: if a checkpoint that rank 0 had been told of is lost, or one looks damaged or is mixed.
    """
    chance = random.Random(seed)
    every = list(calls(lines))
    about = Disk(place / "disk")
    relevant = [call for call in every if about.apply(call) or f"{place}/told/" in call.paths[0]]
    tally = Tally(calls=len(relevant))
    shares: list[Callable[[], float]] = [lambda: 0.0, lambda: 1.0, chance.random]
    wanted = max(1, cuts // len(shares))
    moments = sorted({round(n * len(relevant) / wanted) for n in range(1, wanted + 1)})
    disk, done, told, number = Disk(place / "disk"), 0, 0, itertools.count()
    states: list[tuple[Path, int]] = []
    for moment in moments:
        for call in relevant[done:moment]:
            if call.paths[0].startswith(f"{place}/told/"):
                told = max(told, int(Path(call.paths[0]).name))
            else:
                disk.apply(call)
        done = moment
        # When there are more cuts than calls, chance fills up.
        for share in shares + [chance.random] * max(0, cuts // len(moments) - len(shares)):
            out = place / "cut" / str(next(number))
            disk.cut(out, lambda origin: _content(place, origin), share)
            states.append((out / "new" / "parents" / "c", told))
    tally.cuts = len(states)
    for (_, told), found in zip(states, run_ranks(1, _load, states, group=False, timeout=600)[0], strict=True):
        assert told <= (found or 0) <= told + 1, (told, found)
        tally.newer += (found or 0) > told
        tally.empty += found is None
    return tally


def _content(place: Path, origin: str) -> bytes:
    """The bytes that were written to a file, from where the finished checkpoints were kept."""
    path = Path(origin)
    if path.name.startswith(".latest"):
        return f"step-{int(path.name.partition('#')[2]):08d}\n".encode()
    # DCP writes its metadata under this name first.
    kept = place / "kept" / path.parent.name.removeprefix(".saving-") / path.name.removesuffix(".tmp")
    return kept.read_bytes() if kept.is_file() else b""


def _load(rank: int, states: list[tuple[Path, int]]) -> list[int | None]:
    found = []
    for directory, _ in states:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(crash_kills._load(rank, directory))
        shutil.rmtree(directory.parents[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traced", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.traced is not None:
        save_several(chosen.traced)
        return
    place = Path(tempfile.mkdtemp(prefix="onecopy-cuts-"))
    try:
        tally = replay(place, trace(place), chosen.cuts, chosen.seed)
    finally:
        shutil.rmtree(place)
    print(f"{tally.cuts} power cuts at {tally.calls} system calls of {SAVES} saves: no checkpoint was lost")
    print(f"before the first: {tally.empty}; committed but not yet told: {tally.newer}")


if __name__ == "__main__":
    main()
