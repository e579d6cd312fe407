"""load: a run's state from the newest whole checkpoint of a directory, at any stage and number of ranks.

Before anything is read into the model, every byte is checked, by all ranks together and each file once. A damaged
checkpoint is named and the next older whole one taken. Then each rank reads the parts that it holds, and no others.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from onecopy.checkpoint.directory import check_own, find_checkpoints, is_checkpoint
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.manifest import Manifest, check_content, check_sizes, read_manifest
from onecopy.checkpoint.names import Named, check_has_values, name_tensors
from onecopy.checkpoint.optimizer import States, as_list, make_states, put_states
from onecopy.checkpoint.random import put_generators, unpack
from onecopy.checkpoint.storage import Reader, read_job
from onecopy.errors import CheckpointError, DamagedCheckpointError
from onecopy.sharding.setup.api import phase_of

T = TypeVar("T")

_ATTEMPTS: Final = 20
"""How often a newer checkpoint is looked for when the one that is read is deleted: each time a run has saved."""


@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded.

    Attributes:
        path: the checkpoint.
        step: its step.
        extra: what was saved as such.
        rank_extra: what this rank saved as such; None at another number of ranks.
        ranks: how many ranks saved it. Only at the same number were the random number generators continued.
        skipped: checkpoints that were damaged, and how.
    """

    path: Path
    step: int
    extra: Any
    rank_extra: Any
    ranks: int
    skipped: tuple[str, ...]


def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    strict: bool = True,
    check: bool = True,
) -> Loaded:
    """Load a checkpoint of `save` into a model, its optimizer and more. Every rank calls it.

    The model may be sharded by onecopy at any stage, plain, in DDP or under fully_shard, whichever of these saved the
    checkpoint. Memory: what the rank holds anyway, and one piece of one tensor. On as many ranks as saved it, the run
    continues exactly, to the last bit.

    Args:
        directory: the directory of a run's checkpoints, or a single checkpoint. From a run's directory the newest
            whole checkpoint is loaded, with a warning for each newer one that is damaged. A single checkpoint must be
            whole.
        optimizer: one, or several; take states and, matched by parameter names, hyperparameters. None: weights alone.
        scheduler, scaler: take the states that were saved of a scheduler and a scaler, if there are any. A list takes
            what a list of as many was saved of.
        strict: whether a name that only the model or only the checkpoint has is an error. If not, its tensor stays as
            it is. Frozen parameters keep their values if the checkpoint holds trainable parameters only.
        check: compare every byte with its checksum first. False compares only the sizes of the files.

    Returns:
        A `Loaded`: the checkpoint, its step, and what was saved beside the model.

    Raises:
        CheckpointError: if there is no whole checkpoint, or it does not fit; lists every name that does not.
        UsageError: if the model is on meta.
    """
    group = Group.current()
    group.finish_background()
    named = name_tensors(model)
    check_has_values(named)

    def load_found(found: Whole) -> Loaded:
        return _load(group, found, named, model, as_list(optimizer), scheduler, scaler, strict)

    return on_newest(Path(directory), load_found, check=check)


def _load(
    group: Group,
    found: Whole,
    named: Named,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Any,
    scaler: Any,
    strict: bool,
) -> Loaded:
    path, manifest, job, metadata = found.path, found.manifest, found.job, found.metadata
    saved = {key: m for key, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    # Whoever saved the trainable parameters alone has the others' values from elsewhere.
    frozen = {name for name, p in named.parameters.items() if not p.requires_grad and job.get("trainable_only")}
    _check_fits(path, named, saved, job["aliases"], strict, frozen)

    wanted = {f"model.{name}": tensor for name, tensor in named.tensors.items() if f"model.{name}" in saved}
    states: States = {}
    if optimizers:
        if "optimizer" not in job:
            raise CheckpointError(
                f"{path}: no optimizer was saved with it; to load only the model, pass optimizer=None"
            )
        states = make_states(optimizers, named, _states_in(metadata, saved))
        wanted |= {f"optimizer.state.{name}.{key}": t for name, own in states.items() for key, t in own.items()}
    same_ranks = manifest.ranks == group.size
    own_rank = torch.empty(0, dtype=torch.uint8)
    if same_ranks and f"ranks.{group.rank}" in saved:
        own_rank = torch.empty(saved[f"ranks.{group.rank}"].size, dtype=torch.uint8)
        wanted[f"ranks.{group.rank}"] = own_rank
    with phase_of(model, "load"):
        read_tensors(found.reader, wanted)

    for optimizer in optimizers:
        put_states(optimizer, named, states, job["optimizer"])
    of_rank: dict[str, Any] = {"extra": None}

    def put_rest() -> None:
        for part, name in ((scheduler, "scheduler"), (scaler, "scaler")):
            if part is not None and name in job:
                _put_state(part, job[name], name)
        _put_objects(model, job["objects"])
        if own_rank.numel():
            of_rank.update(unpack(own_rank))
        if "generators" in of_rank:
            put_generators(of_rank["generators"])

    group.together("restoring what is no tensor", put_rest)
    return Loaded(path, manifest.step, job.get("extra"), of_rank["extra"], manifest.ranks, found.skipped)


def _put_state(part: Any, state: Any, name: str) -> None:
    parts = list(part) if isinstance(part, list | tuple) else [part]
    states = state if isinstance(state, list) else [state]
    if len(parts) != len(states):
        raise CheckpointError(f"{name}= must have as many as were saved, {len(states)}; found {len(parts)}")
    for one, own in zip(parts, states, strict=True):
        one.load_state_dict(own)


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose files are all as they were written.

    Attributes:
        job: what it holds beside tensors.
        metadata: of its tensors.
        reader: of its tensors.
        skipped: what is wrong with each one that would have come before it.
    """

    path: Path
    manifest: Manifest
    job: dict[str, Any]
    metadata: Metadata
    reader: Reader
    skipped: tuple[str, ...]


def on_newest(directory: Path, do: Callable[[Whole], T], *, check: bool = True) -> T:
    """Do something with the checkpoint that `find_whole` finds. Every rank calls it.

    A run that saves meanwhile may delete it in favour of a newer one; then it is done again, with that one.
    """
    group = Group.current()
    for attempts_left in reversed(range(_ATTEMPTS)):
        found = find_whole(directory, check=check)
        try:
            return do(found)
        except CheckpointError:
            if found.path == directory or not attempts_left or not _is_gone(group, found.path):
                raise
    raise AssertionError


def find_whole(directory: Path, *, check: bool = True) -> Whole:
    """The checkpoint that is to be loaded from a directory, or the one that is given. Every rank calls it.

    Raises:
        DamagedCheckpointError: if a single one is given and not whole.
        CheckpointError: if there is none, or none that is whole.
    """
    group = Group.current()
    single = group.on_first("looking for checkpoints", lambda: is_checkpoint(directory))

    def look() -> list[Path]:
        return [directory] if single else group.on_first("looking for checkpoints", lambda: find_checkpoints(directory))

    paths, searches = look(), 1
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r}")
    skipped: list[str] = []
    while paths:
        path = paths.pop(0)
        try:
            manifest = check_whole(path, check=check, own=not single)
            job, reader = _read_small(group, path)
        except DamagedCheckpointError as error:
            if single:
                raise
            if searches < _ATTEMPTS and _is_gone(group, path):
                # Not damaged, but deleted by a run that has saved a newer one.
                paths, skipped, searches = look(), [], searches + 1
            else:
                skipped.append(str(error))
            continue
        if skipped and group.rank == 0:
            warnings.warn(f"loading {path}, since these are damaged:\n" + "\n".join(skipped), stacklevel=3)
        return Whole(path, manifest, job, reader.read_metadata(), reader, tuple(skipped))
    raise CheckpointError(f"no checkpoint in {str(directory)!r} is whole:\n" + "\n".join(skipped))


def _is_gone(group: Group, path: Path) -> bool:
    return group.on_first("looking for a checkpoint", lambda: not os.path.lexists(path))


def check_whole(path: Path, *, check: bool = True, own: bool = False) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written. Every rank calls it, and reads a share.

    Args:
        own: found in a directory of checkpoints, where it must lie itself and not be a link.

    Raises:
        DamagedCheckpointError: on every rank.
    """
    group = Group.current()

    def look() -> Manifest:
        if own:
            check_own(path)
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        if check:
            check_content(path, manifest, sorted(manifest.files)[group.rank :: group.size])
        return manifest

    return group.together("checking a checkpoint", look)[group.rank]


def read_tensors(reader: FileSystemReader, wanted: Mapping[str, Tensor], group: Group | None = None) -> None:
    """Fill tensors in place from files, each rank its own parts. Every rank calls it.

    Args:
        wanted: by the files' key; plain tensors, SlicedTensors or DTensors, of the saved shapes.
        group: the ranks that read together; None: all.
    """
    group = group or Group.current()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def read() -> None:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, group.rank == 0)
        planner.set_up_planner(dict(wanted), metadata, group.rank == 0)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        with torch.no_grad():
            reader.read_data(plan, planner).wait()

    group.together("reading a checkpoint", read)


def _read_small(group: Group, path: Path) -> tuple[dict[str, Any], Reader]:
    """What is read whole on every rank; the reader has its metadata."""
    found: list[tuple[dict[str, Any], Reader]] = []

    def read() -> None:
        reader = Reader(path)
        reader.read_metadata()
        found.append((read_job(path), reader))

    group.together("reading a checkpoint", read)
    return found[0]


def _states_in(metadata: Metadata, saved: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """The metadata of each optimizer state, by names of parameter and state."""
    paths = {key: (metadata.planner_data or {}).get(key, ()) for key in saved}
    return {(p[2], p[3]): saved[key] for key, p in paths.items() if len(p) == 4 and p[:2] == ("optimizer", "state")}


def _check_fits(
    path: Path,
    named: Named,
    saved: Mapping[str, Any],
    aliases: Mapping[str, str],
    strict: bool,
    optional: Collection[str],
) -> None:
    """Compare names and shapes, and list all that differ. The checkpoint need not have what is ``optional``."""
    shapes = {key.removeprefix("model."): m.size for key, m in saved.items() if key.startswith("model.")}
    known = {*named.tensors, *named.aliases}
    # Of tied weights one name is enough.
    satisfied = known | {name for alias, name in aliases.items() if alias in known}
    lines = [
        f"shape of {name}: {tuple(shapes[name])} in the checkpoint, {tuple(tensor.shape)} in the model"
        for name, tensor in named.tensors.items()
        if name in shapes and shapes[name] != tensor.shape
    ]
    if strict:
        lines += [f"only in the model: {name}" for name in named.tensors if name not in shapes and name not in optional]
        lines += [
            f"only in the checkpoint: {name}"
            for name in shapes
            if name not in satisfied and aliases.get(name) not in satisfied
        ]
    if lines:
        raise CheckpointError(f"{path} does not fit the model:\n" + "\n".join(lines))


def _put_objects(model: nn.Module, objects: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        owner, _, kind = name.rpartition(".")
        if kind == "_extra_state":
            put: Callable[[Any], None] = model.get_submodule(owner).set_extra_state
            put(value)
