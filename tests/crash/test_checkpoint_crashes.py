"""Crashes, full disks and damage. What must hold: no good checkpoint is lost, and no bad one is loaded.

Every checkpoint here holds a constant that tells which save it is from, in every weight, so a mixture would show.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from models import filled
from onecopy.checkpoint import metadata, storage
from onecopy.checkpoint.group import Group
from onecopy.errors import CheckpointError, CollectiveError, DamagedCheckpointError
from oracle import gathered_weights
from ranks import RankError, run_ranks


def _model(value: float) -> nn.Module:
    return onecopy.shard(filled(value), 3)


def _save(rank: int, directory: Path, value: float, **settings: Any) -> None:
    model = _model(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    onecopy.save(directory, model, optimizer, extra=value, step=int(value), **settings).wait()


def _load(rank: int, directory: Path) -> tuple[float, tuple[str, ...], list[str]]:
    """The constant of what was loaded, and what was said about checkpoints that were not."""
    model = _model(-1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loaded = onecopy.load(directory, model, optimizer)
    for weight in gathered_weights(model).values():
        assert torch.equal(weight, torch.full_like(weight, loaded.extra))
    said = [str(warning.message) for warning in seen if "damaged" in str(warning.message)]
    return loaded.extra, loaded.skipped, said


def load_one(directory: Path) -> tuple[float, tuple[str, ...], list[str]]:
    return run_ranks(1, _load, directory, group=False)[0]  # type: ignore[no-any-return]


# --- kill -9


class Faults:
    """Counts what a save asks of the file system, and ends the process at one of these."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.seen: list[str] = []

    def __enter__(self) -> Faults:
        self._before = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")}
        for name, function in self._before.items():
            setattr(os, name, self._counted(name, function))
        self._write = storage._HashingStream.write
        storage._HashingStream.write = self._counted("write", self._write)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(os, name, function)
        storage._HashingStream.write = self._write  # type: ignore[method-assign]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) - 1 == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call


def _save_and_die(rank: int, directory: Path, victim: int, point: int | None, background: bool) -> list[str]:
    with Faults(point if rank == victim else None) as faults:
        _save(rank, directory, 2.0, keep=1, background=background)
    return faults.seen


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("first") / "c"
    run_ranks(2, _save, directory, 1.0)
    return directory


def test_kill_9_at_every_step_of_a_save_leaves_a_whole_checkpoint(first: Path, tmp_path: Path) -> None:
    """With keep=1, so that deleting is among the steps. Then the next save works, and clears away what was left."""
    shutil.copytree(first, tmp_path / "dry")
    steps = run_ranks(2, _save_and_die, tmp_path / "dry", 0, None, False)[0]
    assert load_one(tmp_path / "dry")[0] == 2.0
    writes = [point for point, name in enumerate(steps) if name == "write"]
    others = [point for point, name in enumerate(steps) if name != "write"]
    assert len(others) >= 12
    chosen = sorted({*others, writes[1], writes[len(writes) // 2], writes[-1]})
    points = [(0, point, number % 2 == 1) for number, point in enumerate(chosen)] + [(1, 0, False), (1, 20, True)]
    outcomes = []
    for number, (victim, point, background) in enumerate(points):
        directory = tmp_path / f"{victim}-{point}"
        shutil.copytree(first, directory)
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(2, _save_and_die, directory, victim, point, background)
        value, skipped, _ = load_one(directory)
        assert skipped == ()
        outcomes.append(value)
        if number % 5 == 0:
            run_ranks(2, lambda rank, directory=directory: _save(rank, directory, 3.0, keep=1))
            assert load_one(directory)[0] == 3.0
            assert not [path for path in directory.iterdir() if path.name.startswith((".saving", ".removing"))]
    # The first rank's moving of `latest` is where the new one begins to count.
    by_first, by_other = outcomes[: len(chosen)], outcomes[len(chosen) :]
    assert (by_first[0], by_first[-1]) == (1.0, 2.0)
    assert sorted(by_first) == by_first
    assert by_other == [1.0, 1.0]


def test_other_ranks_say_whom_they_lost(first: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(first, tmp_path / "c")

    def rank_main(rank: int) -> None:
        if rank == 1:
            with Faults(0):
                _save(rank, directory, 2.0)
        with pytest.raises(CollectiveError, match="rank 0 lost rank 1 while a checkpoint was saved"):
            _save(rank, directory, 2.0)
        (tmp_path / "survivor").write_text("said so")

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, rank_main)
    assert (tmp_path / "survivor").exists()


# --- disks


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="onecopy-disk-"))
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], capture_output=True, check=False)
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"no file system of its own can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
    folder.rmdir()


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_is_an_error_on_every_rank_and_loses_nothing(small_disk: Path, background: bool) -> None:
    directory = small_disk / "c"
    run_ranks(2, _save, directory, 1.0)
    used = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    (small_disk / "ballast").write_bytes(bytes(400 * 1024 - used - 40_000))

    def rank_main(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            _save(rank, directory, 2.0, background=background)
        return str(caught.value)

    for message in run_ranks(2, rank_main):
        assert "No space left on device" in message
    assert [path.name for path in directory.iterdir() if path.name.startswith((".saving", ".removing"))] == []
    assert load_one(directory)[0] == 1.0
    (small_disk / "ballast").unlink()
    run_ranks(2, _save, directory, 3.0)
    assert load_one(directory)[0] == 3.0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without rights can reach."""
    with tempfile.TemporaryDirectory(prefix="onecopy-open-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def _as_nobody(do: Callable[[int], Any]) -> Callable[[int], Any]:
    def run(rank: int) -> Any:
        Group.current()  # The store's file is not nobody's.
        if os.getuid() == 0:  # who may do everything
            os.setuid(65534)
        return do(rank)

    return run


def test_permissions(open_folder: Path) -> None:
    """A directory that must not be written is an error; a file that must not be read makes a checkpoint damaged."""
    directory = open_folder / "c"

    def save(rank: int) -> None:
        _save(rank, directory, 1.0)
        _save(rank, directory, 2.0)

    run_ranks(2, _as_nobody(save))
    directory.chmod(0o555)

    def refused(rank: int) -> None:
        with pytest.raises(CheckpointError, match="Permission denied"):
            _save(rank, directory, 3.0)

    run_ranks(2, _as_nobody(refused))
    next((directory / "step-00000002").glob("*.distcp")).chmod(0)

    def load(rank: int) -> Any:
        return _load(rank, directory)

    value, skipped, _ = run_ranks(1, _as_nobody(load), group=False)[0]
    assert value == 1.0
    assert "Permission denied" in skipped[0]
    directory.chmod(0o777)


# --- damage


@pytest.fixture(scope="module")
def two(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two") / "c"
    shutil.copytree(first, directory)
    run_ranks(2, _save, directory, 2.0)
    return directory


def _flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": lambda path: _flip(path, 0.0),
    "a byte in the middle": lambda path: _flip(path, 0.5),
    "last byte": lambda path: _flip(path, 1.0),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_named_and_the_older_checkpoint_taken(two: Path, tmp_path: Path, damage: str) -> None:
    """By two ranks, which share the checking: both must take the same one."""
    files = sorted(path.name for path in (two / "step-00000002").iterdir())
    assert len(files) == 5
    copies = [(shutil.copytree(two, tmp_path / name), name) for name in files]
    for directory, name in copies:
        DAMAGES[damage](directory / "step-00000002" / name)

    def rank_main(rank: int) -> list[Any]:
        found = [_load(rank, directory) for directory, _ in copies]
        for directory, name in copies:
            with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
                onecopy.load(directory / "step-00000002", _model(0.0))
        return found

    for rank, results in enumerate(run_ranks(2, rank_main)):
        for (value, skipped, said), (_, name) in zip(results, copies, strict=True):
            assert value == 1.0
            assert "step-00000002" in skipped[0]
            assert name in skipped[0]
            # One rank speaks for all.
            assert len(said) == (1 if rank == 0 else 0)


def test_nothing_whole_is_an_error_that_names_each(two: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(two, tmp_path / "c")
    for path in directory.glob("step-*"):
        (path / "manifest.json").unlink()

    def rank_main(rank: int) -> None:
        model = _model(5.0)
        with pytest.raises(CheckpointError, match=r"(?s)is whole.*step-00000002.*step-00000001"):
            onecopy.load(directory, model)
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            onecopy.load(tmp_path / "empty", model)
        # The model is as it was.
        assert all(torch.equal(weight, torch.full_like(weight, 5.0)) for weight in gathered_weights(model).values())

    (tmp_path / "empty").mkdir()
    run_ranks(2, rank_main)


def test_keeps_as_many_as_asked_and_counts_no_damaged_ones(two: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(two, tmp_path / "c")
    next((directory / "step-00000002").glob("*.distcp")).unlink()
    run_ranks(2, lambda rank: _save(rank, directory, 3.0, keep=2))
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-00000001", "step-00000002", "step-00000003"]
    run_ranks(2, lambda rank: _save(rank, directory, 4.0, keep=2))
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-00000002", "step-00000003", "step-00000004"]
    assert (directory / "latest").read_text() == "step-00000004\n"


def test_going_back_and_saving_a_step_again(two: Path, tmp_path: Path) -> None:
    """What was saved last counts, whatever its step; the same step gets a second name."""
    directory = shutil.copytree(two, tmp_path / "c")
    run_ranks(2, lambda rank: _save(rank, directory, 1.0))
    assert (directory / "latest").read_text() == "step-00000001-2\n"
    assert load_one(directory)[0] == 1.0
    (directory / "latest").unlink()
    assert load_one(directory)[0] == 1.0
    (directory / "latest").write_text("step-00000002\n")
    assert load_one(directory)[0] == 2.0


def test_metadata_may_name_members_of_enumerations_and_call_nothing_else() -> None:
    """Python 3.11.2 pickles them by getattr. Oracle: such a pickle, written out; and one that asks for more."""
    home = "torch.distributed.checkpoint.metadata"
    member = f"cbuiltins\ngetattr\n(c{home}\n_MEM_FORMAT_ENCODING\nVTORCH_CONTIGUOUS_FORMAT\ntR."
    found: Any = metadata._ClosedUnpickler(io.BytesIO(member.encode())).load()
    assert found.name == "TORCH_CONTIGUOUS_FORMAT"
    evil = f"cbuiltins\ngetattr\n(c{home}\nMetadata\nV__init__\ntR."
    with pytest.raises(pickle.UnpicklingError, match="no metadata needs"):
        metadata._ClosedUnpickler(io.BytesIO(evil.encode())).load()
