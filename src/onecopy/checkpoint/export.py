"""export: a checkpoint's weights as Hugging Face safetensors, one tensor in memory at a time, each rank a part of it.

    model.safetensors, or model-00001-of-00007.safetensors, ... and model.safetensors.index.json
    config.json, tokenizer.json, ...   what was saved with the checkpoint

Tied weights are written once, under their first name, as `save_pretrained` does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.directory import remove
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.load import Whole, on_newest, read_tensors
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.save_pretrained import FILE_BYTES, with_dtype
from onecopy.checkpoint.storage import Reader
from onecopy.checkpoint.weights_out import on_disk, write_weights
from onecopy.checkpoint.writing import ASSET
from onecopy.comm.mesh import Axis
from onecopy.errors import CheckpointError, DamagedCheckpointError, OnecopyError, SettingsError
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing
from onecopy.untrusted import Refused, open_plain, plain_name, read_json

DTYPES: Final = {"saved": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    Attributes:
        source: the checkpoint.
        step: its step.
        files: bytes of each file, by name.
        parameters: elements of all tensors.
    """

    source: Path
    step: int
    files: Mapping[str, int]
    parameters: int


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    assets: Iterable[str | Path] = (),
) -> Exported:
    """Write a checkpoint's weights as transformers loads them. Inside a run every rank calls it, and writes a share.

    Memory: this rank's part of one tensor, and one piece of it (64 MiB). Disk: the new files.

    Args:
        checkpoint: one, or a directory of them, of which the newest whole one is taken.
        out: a directory that is new or empty. It appears only when it is complete.
        dtype: dtype of the floating-point tensors in the files. None keeps that of the master weights.
        file_bytes: most bytes of tensors in a weights file. A file holds at least one tensor, however large.
        assets: files to add, such as config.json or a tokenizer's. They replace files of the same name that were
            saved with the checkpoint.

    Returns:
        An `Exported`: the checkpoint, and the bytes of each file.

    Raises:
        SettingsError: if ``out`` is not empty or cannot be made, or if transformers cannot load ``dtype``.
        CheckpointError: if a file cannot be written, if there is no whole checkpoint, or if the checkpoint holds
            trainable parameters only.
    """
    if dtype is not None and dtype not in _NAMES:
        expected = ", ".join(f"torch.{name}" for name in _NAMES.values())
        raise SettingsError(
            f"dtype must be one of {expected}, or None for the dtype of the master weights; found {dtype!r}"
        )
    target, group = Path(out), Group.current()
    group.finish_background()
    group.on_first("looking at where to export", lambda: _check_free(target))
    given = list(assets)
    return on_newest(Path(checkpoint), lambda found: _export(found, group, target, dtype, file_bytes, given))


def _export(
    found: Whole,
    group: Group,
    target: Path,
    dtype: torch.dtype | None,
    file_bytes: int,
    assets: Iterable[str | Path],
) -> Exported:
    path, manifest, job = found.path, found.manifest, found.job
    if job.get("trainable_only"):
        raise CheckpointError(
            f"{path} holds the trainable parameters alone (save(trainable_only=True)); transformers would fill in "
            "random values for the others: load it into the model, save the whole model, and export that"
        )
    saved = found.metadata.state_dict_metadata
    tensors = {
        key.removeprefix("model."): metadata
        for key, metadata in saved.items()
        if key.startswith("model.") and isinstance(metadata, TensorStorageMetadata)
    }
    whole = {name: _empty(metadata, dtype) for name, metadata in tensors.items() if name not in job["aliases"]}
    dtypes = {name: tensors[name].properties.dtype for name in whole}
    making = target.with_name(f".exporting-{target.name}")
    added = _kept(path, manifest)
    added |= {Path(file).name: partial(_open, Path(file)) for file in assets}

    def complete() -> dict[str, int]:
        for name, open_source in added.items():
            with open_source() as source, (making / name).open("xb") as copy:
                shutil.copyfileobj(source, copy)
        if dtype is not None and (making / "config.json").exists():
            _set_dtype(making / "config.json", dtype)
        if target.exists():
            target.rmdir()
        making.rename(target)
        return {file.name: file.stat().st_size for file in sorted(target.iterdir())}

    try:
        group.on_first("exporting", lambda: on_disk(target, lambda: _begin(making), SettingsError))
        write_weights(_Saved(found.reader, whole, dtypes, group), making, group=group, file_bytes=file_bytes)
        files = group.on_first("exporting", lambda: on_disk(target, complete))
    except OnecopyError:
        if group.rank == 0:
            shutil.rmtree(making, ignore_errors=True)
        raise
    return Exported(path, manifest.step, files, sum(tensor.numel() for tensor in whole.values()))


def _check_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{str(target)!r} must be new or empty, so that nothing is overwritten")


def _begin(making: Path) -> None:
    if os.path.lexists(making):
        remove(making)
    making.mkdir(parents=True)


def _kept(checkpoint: Path, manifest: Manifest) -> dict[str, Callable[[], BinaryIO]]:
    """Files that were saved to be put beside the weights: for each name, what opens it.

    Raises:
        DamagedCheckpointError: if one would take a weights file's place, or lie elsewhere.
    """
    kept: dict[str, Callable[[], BinaryIO]] = {}
    for file in manifest.files:
        if file.startswith(ASSET):
            try:
                name = plain_name(file.removeprefix(ASSET))
            except Refused as error:
                raise DamagedCheckpointError(f"{checkpoint}: {error}") from None
            if name.endswith((".safetensors", ".safetensors.index.json")):
                raise DamagedCheckpointError(f"{checkpoint}: it holds a file {name!r}, which export itself writes")
            kept[name] = partial(open_plain, checkpoint / file)
    return kept


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _empty(metadata: TensorStorageMetadata, dtype: torch.dtype | None) -> torch.Tensor:
    own = metadata.properties.dtype
    return torch.empty(metadata.size, dtype=dtype if dtype and own.is_floating_point else own, device="meta")


class _Saved:
    """Tensors of a checkpoint, as a `Source`: each rank reads the part that it writes."""

    def __init__(
        self, reader: Reader, tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], group: Group
    ) -> None:
        self.tensors = tensors
        self._reader = reader
        self._dtypes = dtypes
        self._group = group
        self._axis = Axis("shard", None, Staging(), Ledger())

    def runs(self, name: str, together: bool) -> Iterator[tuple[int, torch.Tensor]]:
        if not together and self._group.rank:
            return
        shape, numel = self.tensors[name].shape, self.tensors[name].numel()
        place, parts = (self._group.rank, self._group.size) if together else (0, 1)
        begin, end = numel * place // parts, numel * (place + 1) // parts
        if begin == end:
            return
        part = torch.empty(end - begin, dtype=self._dtypes[name])
        slicing = Slicing(name, shape, self.tensors[name].stride(), begin, end - begin, self._axis)
        read_tensors(self._reader, {f"model.{name}": SlicedTensor(part, slicing)}, Group(None))
        yield begin, part


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    try:
        settings = read_json(config)
        if not isinstance(settings, dict):
            raise Refused("it must hold a JSON object")
    except Refused as error:
        raise CheckpointError(f"the new dtype cannot be written into config.json: {error}") from None
    config.write_bytes(with_dtype(settings, dtype))
