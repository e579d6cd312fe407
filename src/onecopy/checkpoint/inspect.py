"""inspect: what is in a checkpoint, who saved it, whether it is whole, and who can load it. For people and scripts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.directory import check_own, find_checkpoints, is_checkpoint, read_latest
from onecopy.checkpoint.manifest import Manifest, check_content, check_sizes, read_manifest
from onecopy.checkpoint.storage import Reader, read_job
from onecopy.checkpoint.writing import ASSET
from onecopy.errors import CheckpointError, DamagedCheckpointError

_ATTEMPTS: Final = 20
"""How often the directory is listed when all that it had was deleted meanwhile."""


@dataclass(frozen=True)
class Section:
    """Tensors of one kind: how many, their elements and bytes, and elements by dtype."""

    tensors: int
    elements: int
    nbytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True)
class Inspected:
    """One checkpoint.

    Attributes:
        path: where it is.
        latest: whether `latest` names it.
        damage: what is wrong with it, None if it is whole; what follows is empty where it cannot be known.
        step, ranks, nbytes: its step, the ranks that saved it, bytes of its files.
        saved_by: versions, stage and time.
        files: bytes by name.
        sections: "parameters and buffers" and "optimizer states".
        tied: further names of weights, by name.
        groups: the optimizer's, each with its number of parameters and hyperparameters.
        parts: what else was saved.
        loads_in: who can load it.
    """

    path: str
    latest: bool
    damage: str | None
    step: int | None = None
    ranks: int | None = None
    nbytes: int | None = None
    saved_by: Mapping[str, Any] | None = None
    files: Mapping[str, int] | None = None
    sections: Mapping[str, Section] | None = None
    tied: Mapping[str, str] | None = None
    groups: list[dict[str, Any]] | None = None
    parts: list[str] | None = None
    loads_in: list[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(directory: str | Path, *, check: bool = True) -> list[Inspected]:
    """Look at one checkpoint, or at all in a directory, in the order in which `load` tries them.

    Args:
        check: read every byte against its checksum; else only sizes are looked at.

    Raises:
        CheckpointError: if there is none.
    """
    root = Path(directory)
    single = is_checkpoint(root)
    for _ in range(_ATTEMPTS):
        paths = [root] if single else find_checkpoints(root)
        if not paths:
            raise CheckpointError(f"there is no checkpoint in {str(directory)!r}")
        latest = read_latest(root.parent if single else root)
        found = [_inspect(path, path.name == latest, check, own=not single) for path in paths]
        # What a run that saves has deleted meanwhile is not damaged; and there is a newer one.
        there = [one for one in found if one.damage is None or os.path.lexists(one.path)]
        if there or single:
            return there or found
    raise CheckpointError(f"each checkpoint in {str(directory)!r} was deleted before it could be looked at")


def _inspect(path: Path, latest: bool, check: bool, *, own: bool) -> Inspected:
    try:
        if own:
            check_own(path)
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        if check:
            check_content(path, manifest, manifest.files)
        metadata = Reader(path).read_metadata()
        job = read_job(path)
    except DamagedCheckpointError as error:
        return Inspected(str(path), latest, str(error).removeprefix(f"{path}: "))
    tensors = {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    tied = job["aliases"]
    return Inspected(
        str(path),
        latest,
        None,
        step=manifest.step,
        ranks=manifest.ranks,
        nbytes=manifest.size,
        saved_by=manifest.saved_by,
        files={name: entry.size for name, entry in manifest.files.items()},
        sections={
            "parameters and buffers": _section(
                {k: m for k, m in tensors.items() if k.startswith("model.") and k.removeprefix("model.") not in tied}
            ),
            "optimizer states": _section({k: m for k, m in tensors.items() if k.startswith("optimizer.")}),
        },
        tied=tied,
        groups=[
            {"parameters": len(group["names"]), **{k: v for k, v in group["values"].items() if _is_plain(v)}}
            for group in job.get("optimizer", {}).get("groups", [])
        ],
        parts=[name for name in ("scheduler", "scaler", "extra") if job.get(name) is not None],
        loads_in=_loaders(manifest, job, generators=any(key.startswith("ranks.") for key in tensors)),
    )


def _section(tensors: Mapping[str, TensorStorageMetadata]) -> Section:
    dtypes: Counter[str] = Counter()
    nbytes = 0
    for metadata in tensors.values():
        numel = metadata.size.numel()
        dtypes[str(metadata.properties.dtype).removeprefix("torch.")] += numel
        nbytes += numel * metadata.properties.dtype.itemsize
    return Section(len(tensors), sum(dtypes.values()), nbytes, dict(dtypes))


def _loaders(manifest: Manifest, job: Mapping[str, Any], *, generators: bool) -> list[str]:
    what = "model and optimizer" if "optimizer" in job else "model"
    ranks = f"{manifest.ranks} rank{'s' * (manifest.ranks != 1)}"
    found = [
        f"onecopy.load: {what}, at any stage and number of ranks, also plain, DDP and fully_shard",
        "torch.distributed.checkpoint.load: tensors under model.* and optimizer.state.*",
    ]
    if "optimizer" in job and generators:
        found.insert(1, f"onecopy.load on {ranks}: goes on bit for bit, random numbers included")
    if ASSET + "config.json" in manifest.files:
        found.append("onecopy export: as Hugging Face safetensors with its config")
    else:
        found.append("onecopy export: as safetensors; no config.json was saved with it")
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list) or value is None
