"""load_pretrained: Hugging Face safetensors into a sharded model, each rank reading the parts that it holds.

Built on meta, such a model has no memory until here, so no rank ever holds more than its slices and a piece of one
tensor. The files are read by torch.distributed.checkpoint's own reader of safetensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from onecopy.checkpoint.experts import Piece, find_piece, missing_pieces, rename
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.load import read_tensors
from onecopy.checkpoint.names import Named, clean_name, name_tensors
from onecopy.checkpoint.weights_file import check_safetensors
from onecopy.errors import CheckpointError, UsageError
from onecopy.sharding.setup.whole import allocate
from onecopy.untrusted import Refused, plain_name, read_json, reason

_INDEX: Final = "model.safetensors.index.json"

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Listed(FileSystem):
    """A file system that shows the files of one model, whatever else lies beside them."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: Any) -> list[str]:
        return self._files


class _SafetensorsReader(HuggingFaceStorageReader):
    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.fs = _Listed(_find_files(directory))


def load_pretrained(
    model: ModelT,
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
    init: Callable[[nn.Module], object] | None = None,
) -> ModelT:
    """Load weights from safetensors files into a model, in place. Every rank calls it, and must see the files.

    Experts that the files hold one by one are put into the fused tensors of transformers 5.
    Memory: each rank's slices, and the part of one tensor that is being read. Traffic: none.

    Args:
        model: sharded by `onecopy.shard`, on its device or on meta; or any other model.
        directory: holds model.safetensors, or several files and model.safetensors.index.json.
        device: where a model on meta gets its memory.
        strict: whether a name that only the model or only the files have is an error. If not, only a missing parameter
            of a model on meta is an error, because it would have no values.
        init: a function. It is called with each module of a model on meta that has buffers in no file (computed tables
            such as rotary frequencies). None calls the `_init_weights` that models of transformers have, or else the
            module's `reset_parameters`.

    Returns:
        ``model``.

    Raises:
        CheckpointError: if files are missing or do not fit; every name that is missing, unexpected or of another shape
            is listed.
    """
    reader, metadata = _open(Path(directory))
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    prefix = getattr(model, "base_model_prefix", "")
    named = name_tensors(model)
    keys = _match(metadata, named, prefix)
    pieces = _find_pieces(metadata, named, keys, prefix)
    _check(Path(directory), metadata, named, keys, pieces, strict, on_meta, _ignored(model))
    unsaved: list[nn.Module] = []
    if on_meta:
        unsaved = _with_unsaved_buffers(model, keys.values())
        allocate(model, device)
        named = name_tensors(model)
    tensors = named.tensors
    whole = {key: tensors[name] for key, name in keys.items()}
    read_tensors(reader, whole | {key: piece.of(tensors[piece.name]) for key, piece in pieces.items()})
    for module in unsaved:
        _initialise(model, module, init)
    return model


def _open(directory: Path) -> tuple[_SafetensorsReader, Mapping[str, Any]]:
    opened: list[tuple[_SafetensorsReader, Mapping[str, Any]]] = []

    def read() -> None:
        reader = _SafetensorsReader(directory)
        opened.append((reader, reader.read_metadata().state_dict_metadata))

    Group.current().together("reading safetensors", read)
    return opened[0]


def _find_files(directory: Path) -> list[Path]:
    """The files of weights in a directory.

    Raises:
        CheckpointError: if there are none, the index names one that is not there, or one is no plain file of weights.
    """
    index, names = directory / _INDEX, []
    if os.path.lexists(index):
        names = _listed_in(index)
    elif os.path.lexists(directory / "model.safetensors"):
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    missing = [name for name in names if not os.path.lexists(directory / name)]
    if missing or not names:
        what = f"its index names {', '.join(missing)}, which is not there" if missing else "there is no .safetensors"
        raise CheckpointError(f"cannot load weights from {str(directory)!r}: {what}")
    return [_checked(directory / name) for name in names]


def _listed_in(index: Path) -> list[str]:
    try:
        table = read_json(_own(index))
        listed = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(listed, dict):
            raise Refused("it must have an object weight_map; found none")
        return sorted({plain_name(name) for name in listed.values()})
    except (OSError, Refused) as error:
        raise CheckpointError(f"{str(index)!r} is no index of weights: {reason(error)}") from None


def _checked(file: Path) -> Path:
    try:
        check_safetensors(_own(file))
    except (OSError, Refused) as error:
        raise CheckpointError(f"cannot load weights from {str(file)!r}: {reason(error)}") from None
    return file


def _own(file: Path) -> Path:
    """The file; or, in a cache of Hugging Face's hub, where every name is a link to content beside it, that content."""
    content = file.parent.parent.parent / "blobs"
    if file.is_symlink() and file.parent.parent.name == "snapshots" and file.resolve().parent == content.resolve():
        return file.resolve()
    return file


def _match(keys: Iterable[str], named: Named, prefix: str) -> dict[str, str]:
    """The model's name for each key of the files that it knows, with or without the prefix of a base model."""
    tensors = named.tensors
    found: dict[str, str] = {}
    for key in keys:
        for name in _spellings(key, prefix):
            name = named.aliases.get(name, name)
            # A tied weight may be there under each of its names.
            if name in tensors and name not in found.values():
                found[key] = name
                break
    return found


def _spellings(key: str, prefix: str) -> list[str]:
    return [name for own in (key, rename(key)) for name in (own, f"{prefix}.{own}", own.removeprefix(f"{prefix}."))]


def _find_pieces(keys: Iterable[str], named: Named, whole: Mapping[str, str], prefix: str) -> dict[str, Piece]:
    """Where in fused tensors those keys lie that are none of the model's names."""
    tensors = {name: tensor for name, tensor in named.tensors.items() if name not in whole.values()}
    found = {key: find_piece(_spellings(key, prefix), tensors) for key in keys if key not in whole}
    return {key: piece for key, piece in found.items() if piece is not None}


def _check(
    directory: Path,
    metadata: Mapping[str, Any],
    named: Named,
    keys: Mapping[str, str],
    pieces: Mapping[str, Piece],
    strict: bool,
    on_meta: bool,
    ignored: Iterable[str],
) -> None:
    tensors = named.tensors
    lines = [
        f"shape of {name}: {tuple(metadata[key].size)} in the files, {tuple(tensors[name].shape)} in the model"
        for key, name in keys.items()
        if metadata[key].size != tensors[name].shape
    ]
    lines += [
        f"shape of {key}: {tuple(metadata[key].size)} in the files, {tuple(piece.shape)} in the model's {piece.name}"
        for key, piece in pieces.items()
        if metadata[key].size != piece.shape
    ]
    there = {*keys.values(), *(piece.name for piece in pieces.values())} - missing_pieces(pieces.values(), tensors)
    missing = [name for name in tensors if name not in there and (strict or (on_meta and name in named.parameters))]
    lines += [f"missing, only in the model: {name}" for name in missing]
    if strict:
        spare = {*named.tensors, *named.aliases}
        lines += [
            f"unexpected, only in the files: {key}"
            for key in metadata
            if key not in keys
            and key not in pieces
            and key not in spare
            and not any(re.search(pattern, key) for pattern in ignored)
        ]
    if lines:
        raise CheckpointError(f"the weights in {str(directory)!r} do not fit the model:\n" + "\n".join(lines))


def _ignored(model: nn.Module) -> list[str]:
    """Patterns of keys that older files have: what the model computes now, or (of transformers) says it does."""
    computed = [f"^{re.escape(name)}$" for name, _ in model.named_buffers()]
    return computed + list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])


def _with_unsaved_buffers(model: nn.Module, loaded: Iterable[str]) -> list[nn.Module]:
    """Modules with buffers on meta that no file holds."""
    there = set(loaded)
    return [
        module
        for path, module in model.named_modules()
        if any(
            buffer is not None and buffer.is_meta and clean_name(f"{path}.{name}" if path else name) not in there
            for name, buffer in module._buffers.items()
        )
    ]


@torch.no_grad()
def _initialise(model: nn.Module, module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    own = getattr(model, "_init_weights", None)
    if init is not None:
        init(module)
    elif callable(own):
        own(module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        raise UsageError(
            f"{type(module).__name__} has buffers that no file holds, and no reset_parameters() to compute them: "
            "pass onecopy.load_pretrained(..., init=callback)."
        )
