"""save: a training run's state into a directory of checkpoints, so that a crash at any moment loses none.

    every rank    name the states, plan; the first rank lets each replicated piece be written by one rank, evenly
    every rank    (in the background) copy its share to the host, and training goes on
    every rank    write its share beside the checkpoints, sum it up, wait for the disk
    first rank    metadata, manifest, the name, `latest`; then delete what is too old

What a rank could not do, all ranks raise, and the directory is as before.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import onecopy
from onecopy.checkpoint.directory import abandon, begin, commit, find_checkpoints, keep_newest, next_sequence
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.manifest import FileEntry, Manifest, read_manifest
from onecopy.checkpoint.names import Named, name_tensors
from onecopy.checkpoint.optimizer import take_states
from onecopy.checkpoint.random import pack, take_generators
from onecopy.checkpoint.storage import Planner, Writer
from onecopy.errors import CheckpointError, SettingsError, UsageError
from onecopy.sharding.api import engine_of
from onecopy.sharding.pending import PendingGradient
from onecopy.sharding.sliced import SlicedTensor

JOB: Final = "job.pt"
"""What is no tensor of the model's size: scheduler, scaler, groups, extra. Read with `weights_only`."""

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
    """A save under way.

    Attributes:
        copied: bytes that this rank copied to the host to let training go on; given back as they are written.
    """

    def __init__(self, copied: int = 0) -> None:
        self.copied = copied
        self._thread: Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
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

    def _run(self, work: Any, *, background: bool) -> None:
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


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    rank_extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Save a training run between two steps. Every rank calls it; all must see one file system.

    The model may be sharded by onecopy at any stage, plain, in DDP or under fully_shard. Parameters are saved in the
    master dtype, by name, with their true shapes, once; so are optimizer states and persistent buffers (the first
    rank's). Each rank's random number generators are saved too. Traffic: plans and results, no tensors.

    Args:
        directory: of all of this run's checkpoints.
        scheduler, scaler: anything with `state_dict()`.
        extra: the first rank's, as `load` returns it: position in the data, and the like. Plain types and tensors.
        rank_extra: this rank's own, given back at the same number of ranks.
        step: number of the checkpoint. None: one more than the newest has.
        keep: delete all but so many of the newest. None keeps all.
        background: return once this rank's share is copied (bytes: `Saving.copied`) and write it meanwhile. A second
            save waits for the first one, so there is never more than one copy.

    Returns:
        The save; without ``background`` it has ended well. `Saving.wait()` gives the checkpoint's path.

    Raises:
        SettingsError: for a setting that cannot work.
        UsageError: if gradients are waiting for the rest of their step, or a value cannot be saved.
        CheckpointError: if it could not be saved; earlier checkpoints are untouched.
    """
    if keep is not None and keep < 1:
        raise SettingsError(f"keep must be at least 1, the checkpoint being saved; found {keep}")
    if step is not None and step < 0:
        raise SettingsError(f"step must be 0 or more; found {step}")
    group = Group.current()
    group.finish_background()
    named = name_tensors(model)
    _check_between_steps(named)
    contents, job = _collect(named, optimizer, group.rank)
    job |= {"extra": extra, **{n: o.state_dict() for n, o in (("scheduler", scheduler), ("scaler", scaler)) if o}}
    contents["ranks"] = {str(group.rank): _packed({"generators": take_generators(), "extra": rank_extra}, "rank_extra")}
    small = _packed(job, "extra, or the state of the scheduler or scaler,").numpy().tobytes()
    return write(
        Path(directory),
        contents,
        {f"model.{alias}": f"model.{name}" for alias, name in named.aliases.items()},
        small,
        step=step,
        keep=keep,
        background=background,
        saved_by={"parameters": sum(p.numel() for p in named.parameters.values()), **_describe(model, optimizer)},
    )


def write(
    directory: Path,
    contents: Contents,
    aliases: Mapping[str, str],
    job: bytes,
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
        "onecopy": onecopy.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **saved_by,
    }

    def manifest(files: Mapping[str, FileEntry]) -> Manifest:
        return Manifest(step, sequence, group.size, facts, files)

    saving._run(lambda: _write(group, share, job, manifest, keep), background=background)
    if background:
        group.finish_background = saving.wait
    else:
        saving.wait()
    return saving


def _begin(directory: Path, step: int | None) -> tuple[int, int, Path]:
    sequence = next_sequence(directory) if directory.exists() else 1
    if step is None:
        known = [read_manifest(path).step for path in find_checkpoints(directory)[:1]] if sequence > 1 else []
        step = known[0] + 1 if known else 1
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


def _write(group: Group, share: _Share, job: bytes, manifest: Any, keep: int | None) -> Path:
    """Write this rank's share; the first rank makes a checkpoint of all."""
    writer = share.writer

    def write_own() -> tuple[list[WriteResult], dict[str, FileEntry]]:
        results = writer.write_data(share.plan, share.planner).wait() if share.plan.items else []
        return results, dict(writer.written)

    def complete() -> Path:
        assert share.metadata is not None
        writer.write_small(JOB, job)
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


def _collect(named: Named, optimizer: Optimizer | None, rank: int) -> tuple[Contents, dict[str, Any]]:
    # Buffers may differ between ranks; the first one's are kept.
    model: dict[str, Any] = {**named.parameters, **(named.buffers if rank == 0 else {})}
    contents: Contents = {"model": model}
    job: dict[str, Any] = {"aliases": dict(named.aliases), "objects": dict(named.objects)}
    if optimizer is not None:
        tensors, job["optimizer"] = take_states(optimizer, named)
        contents["optimizer"] = {"state": tensors}
    return contents, job


def _check_between_steps(named: Named) -> None:
    for name, parameter in named.parameters.items():
        if isinstance(parameter.grad, PendingGradient):
            raise UsageError(
                f"the gradient of {name!r} waits for the last micro-batch of its step and would be lost: save after "
                f"optimizer.step()"
            )


def _packed(value: Any, what: str) -> Tensor:
    try:
        return pack(value)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{what} holds a value that a checkpoint does not keep, for loading it could run code: give numbers, "
            f"strings, tensors, and lists, tuples and dicts of them ({reason})"
        ) from None


def _describe(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What `onecopy inspect` says about the run that saved."""
    facts: dict[str, Any] = {
        "model": type(model).__name__,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
    }
    kinds: set[type] = {type(parameter) for parameter in model.parameters()}
    if SlicedTensor in kinds:
        engine = engine_of(model)
        mesh = {"shard": engine.mesh.shard.size, "replicate": engine.mesh.copies}
        return facts | {"sharded_by": "onecopy", "stage": engine.stage.number} | mesh
    return facts | {"sharded_by": "fully_shard" if DTensor in kinds else None}
