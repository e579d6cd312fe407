"""One writer for a directory of checkpoints, and any number of readers beside it.

Oracles: which process the test let save first, and that a reader beside a pruning writer never fails.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.checkpoint import directory as directory_module
from onecopy.checkpoint.export import export
from onecopy.checkpoint.inspect import inspect
from onecopy.errors import CheckpointError
from ranks import run_ranks


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _alone(rank: int) -> None:
    """Each rank a run of its own: processes that know nothing of each other."""
    torch.distributed.destroy_process_group()


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    """Three processes: the first saves and stays, the second is refused, and its forked child too; the first one's
    directory is as it was. When the first has been killed, the second may save."""

    def run(rank: int) -> str:
        _alone(rank)
        if rank == 0:
            if os.fork() == 0:
                onecopy.save(tmp_path / "c", _model(), step=1, extra="first")
                (tmp_path / "pid").write_text(str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            return ""
        _wait_for(tmp_path / "pid")
        first = int((tmp_path / "pid").read_text())
        with pytest.raises(CheckpointError) as caught:
            onecopy.save(tmp_path / "c", _model(), step=2)
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".writer", "latest", "step-00000001"]
        assert onecopy.load(tmp_path / "c", _model()).extra == "first"
        os.kill(first, 9)
        deadline = time.monotonic() + 10
        while True:
            try:
                onecopy.save(tmp_path / "c", _model(), step=2)
                break
            except CheckpointError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert onecopy.load(tmp_path / "c", _model()).step == 2
        return str(caught.value).replace(f"process {first} ", "process FIRST ")

    _, message = run_ranks(2, run)
    assert re.search(
        r"another run saves into .*: process FIRST on \S+ since 20\S+ \(.*\)\. End that run, or give", message
    )


def test_workers_of_a_run_that_is_gone_do_not_hold_its_directory(tmp_path: Path) -> None:
    """A forked worker outlives the run that saved, as those of a DataLoader may."""

    def run(rank: int) -> None:
        worker = os.fork()
        if worker == 0:
            onecopy.save(tmp_path / "c", _model(), step=1)
            if os.fork() == 0:
                (tmp_path / "worker").write_text(str(os.getpid()))
                time.sleep(60)
            os._exit(0)
        os.waitpid(worker, 0)
        _wait_for(tmp_path / "worker")
        onecopy.save(tmp_path / "c", _model(), step=2)
        os.kill(int((tmp_path / "worker").read_text()), 9)

    run_ranks(1, run, group=False)


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
def test_a_directory_that_is_deleted_under_a_run_is_an_error(again: bool, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        onecopy.save(tmp_path / "c", _model(), step=1)
        shutil.copytree(tmp_path / "c", tmp_path / "copy")
        shutil.rmtree(tmp_path / "c")
        if again:
            shutil.copytree(tmp_path / "copy", tmp_path / "c")
        with pytest.raises(CheckpointError, match="was deleted or replaced while this run saved into it"):
            onecopy.save(tmp_path / "c", _model(), step=2)
        assert (tmp_path / "c").exists() == again

    run_ranks(1, run, group=False)


def test_every_new_parent_directory_is_on_the_disk(tmp_path: Path) -> None:
    """Oracle: what fsync was called with. A name is on the disk when the directory that it is in was synced."""

    def run(rank: int) -> list[str]:
        synced: list[str] = []
        sync = directory_module.sync_directory

        def note(path: Path) -> None:
            synced.append(str(path.relative_to(tmp_path)))
            sync(path)

        directory_module.sync_directory = note
        directory_module.make(tmp_path / "a" / "b" / "c")
        return synced

    assert run_ranks(1, run, group=False) == [[".", "a", "a/b"]]


def _beside_a_writer(tmp_path: Path, read: Any) -> list[int]:
    """Rank 0 saves and prunes as fast as it can, with keep = 1, while rank 1 reads; what it found, in order."""

    def run(rank: int) -> list[int]:
        _alone(rank)
        if rank == 0:
            for step in range(1, 10_000):
                onecopy.save(tmp_path / "c", _model(), step=step, keep=1)
                if (tmp_path / "done").exists():
                    break
            return []
        _wait_for(tmp_path / "c" / "latest")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return [read(number) for number in range(80)]
        finally:
            (tmp_path / "done").touch()

    return run_ranks(2, run)[1]  # type: ignore[no-any-return]


def test_loads_beside_a_pruning_writer_take_the_newer_one(tmp_path: Path) -> None:
    def read(number: int) -> int:
        loaded = onecopy.load(tmp_path / "c", _model())
        assert not loaded.skipped
        return loaded.step

    found = _beside_a_writer(tmp_path, read)
    assert found == sorted(found)
    assert found[-1] > found[0] + 5


def test_inspects_and_exports_beside_a_pruning_writer_see_no_damage(tmp_path: Path) -> None:
    def read(number: int) -> int:
        if number % 4 == 0:
            return export(tmp_path / "c", tmp_path / f"out{number}").step
        seen = inspect(tmp_path / "c")
        assert [one.damage for one in seen] == [None] * len(seen)
        return max(one.step or 0 for one in seen)

    found = _beside_a_writer(tmp_path, read)
    assert found[-1] > found[0] + 5


def test_a_checkpoint_that_vanishes_while_it_is_read_is_taken_anew(tmp_path: Path) -> None:
    """Not by chance: it is deleted, as a pruning writer does, between its check and the reading of its tensors."""

    def run(rank: int) -> tuple[int, int]:
        from onecopy.checkpoint import load as load_module

        model = _model()
        onecopy.save(tmp_path / "c", model, step=1)
        shutil.copytree(tmp_path / "c" / "step-00000001", tmp_path / "kept")
        onecopy.save(tmp_path / "c", model, step=2)
        read = load_module.read_tensors
        calls = 0

        def vanish(reader: Any, wanted: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                shutil.rmtree(tmp_path / "c" / "step-00000002")
            read(reader, wanted)

        load_module.read_tensors = vanish
        return onecopy.load(tmp_path / "c", _model()).step, calls

    assert run_ranks(1, run, group=False)[0] == (1, 2)


@pytest.mark.parametrize("name", ["step-9", "../elsewhere", "no such name"])
def test_a_latest_that_names_no_checkpoint_is_told_and_the_newest_is_taken(name: str, tmp_path: Path) -> None:
    def run(rank: int) -> tuple[int, list[str]]:
        model = onecopy.shard(_model(), 1)
        for step in (1, 2):
            onecopy.save(tmp_path, model, step=step)
        (tmp_path / "latest").write_text(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = onecopy.load(tmp_path, model).step
        return step, [str(warning.message) for warning in caught]

    ((step, told),) = run_ranks(1, run)
    assert step == 2
    (message,) = [text for text in told if "latest" in text]
    assert repr(name) in message


def test_exported_files_are_as_readable_as_any_that_a_program_makes(tmp_path: Path) -> None:
    """Oracle: a file that Python makes under the same umask."""

    def run(rank: int) -> set[int]:
        model = onecopy.shard(_model(), 1)
        onecopy.save(tmp_path / "run", model, step=1)
        export(tmp_path / "run", tmp_path / "out")
        (tmp_path / "plain").touch()
        return {path.stat().st_mode for path in [tmp_path / "plain", *(tmp_path / "out").glob("*.safetensors")]}

    (modes,) = run_ranks(1, run)
    assert len(modes) == 1
