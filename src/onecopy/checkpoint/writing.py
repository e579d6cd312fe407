"""Writing: contents become a checkpoint, so that a crash at any moment loses none. Every saver ends here.

    every rank    plan; the first rank lets each replicated piece be written by one rank, evenly
    every rank    (in the background) copy its share to the host, and training goes on
    every rank    write its share beside the checkpoints, sum it up, wait for the disk
    first rank    metadata, manifest, the name, `latest`; then delete what is too old

What a rank could not do, all ranks raise, and the directory is as before.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from onecopy.checkpoint.claim import claim
from onecopy.checkpoint.directory import abandon, begin, commit, keep_newest, newest_step, next_sequence
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.manifest import JOB, FileEntry, Manifest
from onecopy.checkpoint.storage import Planner, Writer
from onecopy.errors import CheckpointError
from onecopy.version import __version__

ASSET: Final = "asset-"
"""How the names of files begin that were given to be kept."""

Contents = dict[str, dict[str, Any]]
"""Tensors by section ("model", "optimizer", "ranks") and name, as DCP flattens them."""


@dataclass(frozen=True)
class _Share:
    """What this rank is to write."""

    path: Path
    writer: Writer
    planner: Planner
    plan: SavePlan
    metadata: Metadata | None


class Saving:
    """A save that may still be running in the background.

    Attributes:
        copied: bytes that this rank copied to host memory so that training can continue. They are freed as they are
            written.
    """

    def __init__(self, copied: int = 0) -> None:
        self.copied = copied
        self._thread: Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended, with success or with an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: if it could not be saved; earlier checkpoints are untouched.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self, work: Callable[[], Path], *, background: bool) -> None:
        def finish() -> None:
            try:
                self._path = work()
            except BaseException as error:
                self._error = error

        if background:
            self._thread = Thread(target=finish, name="onecopy checkpoint")
            self._thread.start()
        else:
            finish()


def write(
    directory: Path,
    contents: Contents,
    aliases: Mapping[str, str],
    job: bytes,
    assets: Mapping[str, bytes],
    *,
    step: int | None,
    keep: int | None = None,
    background: bool = False,
    saved_by: Mapping[str, Any],
) -> Saving:
    """Write contents as a checkpoint; `save` and the importers end here. Every rank calls it.

    Args:
        contents: this rank's tensors (plain, SlicedTensor, DTensor or `LazyTensor`), by section and name.
        aliases: from each further key of a tensor to its key.
        job: content of `JOB`, the first rank's.
        assets: small files to be kept, by name; the first rank's.
    """
    group = Group.current()
    step, sequence, path = group.on_first("preparing a checkpoint", lambda: _begin(directory, step))
    try:
        share = _plan(group, path, contents, aliases)
        saving = Saving(share.planner.copy_data(share.plan) if background else 0)
    except CheckpointError:
        if group.rank == 0:
            abandon(path)
        raise
    facts = {
        "onecopy": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **saved_by,
    }

    def manifest(files: Mapping[str, FileEntry]) -> Manifest:
        return Manifest(step, sequence, group.size, facts, files)

    small = {JOB: job, **{ASSET + name: content for name, content in assets.items()}}
    saving._run(lambda: _write(group, share, small, manifest, keep), background=background)
    if background:
        group.finish_background = saving.wait
    else:
        saving.wait()
    return saving


def _begin(directory: Path, step: int | None) -> tuple[int, int, Path]:
    claim(directory)
    sequence = next_sequence(directory)
    if step is None:
        step = newest_step(directory) + 1
    return step, sequence, begin(directory, step)


def _plan(group: Group, path: Path, contents: Contents, aliases: Mapping[str, str]) -> _Share:
    """Agree on who writes what."""
    writer, planner = Writer(path, aliases), Planner()
    first = group.rank == 0

    def plan_own() -> SavePlan:
        planner.set_up_planner(contents, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    own: list[SavePlan] = []
    group.together("planning a checkpoint", lambda: own.append(plan_own()))
    plans = group.gather(own[0])
    shared: list[SavePlan] = []

    def plan_all() -> Metadata:
        nonlocal shared
        assert plans is not None
        shared, metadata = planner.create_global_plan(plans)
        shared = writer.prepare_global_plan(shared)
        return metadata

    metadata: list[Metadata] = []
    group.on_first("planning a checkpoint", lambda: metadata.append(plan_all()))
    final = planner.finish_plan(group.scatter(shared if first else None))
    return _Share(path, writer, planner, final, metadata[0] if first else None)


def _write(
    group: Group,
    share: _Share,
    small: Mapping[str, bytes],
    manifest: Callable[[Mapping[str, FileEntry]], Manifest],
    keep: int | None,
) -> Path:
    """Write this rank's share; the first rank makes a checkpoint of all."""
    writer = share.writer

    def write_own() -> tuple[list[WriteResult], dict[str, FileEntry]]:
        results = writer.write_data(share.plan, share.planner).wait() if share.plan.items else []
        return results, dict(writer.written)

    def complete() -> Path:
        assert share.metadata is not None
        for name, content in small.items():
            writer.write_small(name, content)
        writer.finish(share.metadata, [results for results, _ in written])
        files = {name: entry for _, files in written for name, entry in files.items()} | writer.written
        return commit(share.path, manifest(files).dump())

    try:
        written = group.together("writing a checkpoint", write_own)
        path = group.on_first("completing a checkpoint", complete)
    except CheckpointError:
        if group.rank == 0:
            abandon(share.path)
        raise
    if keep is not None:
        group.on_first("deleting old checkpoints", lambda: keep_newest(path.parent, keep))
    return path
