"""save_pretrained: a running model's weights as Hugging Face safetensors, each rank writing the slices that it holds.

The counterpart of `load_pretrained`. `export` does the same with a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onecopy.checkpoint.finite import first_not_finite
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.names import check_has_values, name_tensors
from onecopy.checkpoint.weights_out import write_weights
from onecopy.errors import NotFiniteError, SettingsError
from onecopy.sharding.engine.engine import Engine, find_engine
from onecopy.sharding.setup.api import phase_of
from onecopy.sharding.tensor.single import gather_slices
from onecopy.sharding.tensor.sliced import SlicedTensor

FILE_BYTES: Final = 5_000_000_000
"""Most bytes of a weights file where nobody says otherwise."""


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> dict[str, int]:
    """Write a model's weights for ``from_pretrained`` and `load_pretrained`. Every rank calls it, outside of a pass.

    Nothing is gathered. Memory: 4 Mi elements on the host; traffic: none. Tied weights are written once, under their
    first name. Persistent buffers are written too. The config of a transformers model is written beside the weights.
    Files of an earlier save are replaced when the new ones are complete. Where ranks do not share the directory's file
    system, the first rank writes everything, one whole tensor at a time, after a warning.

    Args:
        model: sharded by `onecopy.shard`, or any other.
        directory: where the files go. It may be new, or hold an earlier save.
        dtype: dtype of the floating-point tensors in the files. None keeps that of the master weights.
        file_bytes: most bytes of tensors in a file. A file holds at least one tensor, however large.

    Returns:
        Bytes of each weights file, by name.

    Raises:
        CheckpointError: on every rank, if a file cannot be written; earlier files stay as they were.
        NotFiniteError: if a weight holds nan or inf, so that it would replace a good one.
        SettingsError: if ``dtype`` is not a floating-point dtype, or ``file_bytes`` is not a positive whole number.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise SettingsError(
            f"dtype must be a floating-point dtype, or None for that of the master weights; found {dtype}"
        )
    named = name_tensors(model)
    check_has_values(named)
    target = Path(directory)
    with phase_of(model, "save"):
        if (engine := find_engine(model)) is not None:
            engine.buffers.make_equal()
        written = save_tensors(named.tensors, target, dtype=dtype, file_bytes=file_bytes)
        Group.current().on_first("writing a config", lambda: _write_configs(model, target, dtype))
    return written


def save_tensors(
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    stem: str = "model",
) -> dict[str, int]:
    """Write named tensors, sliced or not, into ``STEM.safetensors`` or several files. Every rank calls it.

    Args and errors are those of `save_pretrained`.
    """
    if isinstance(file_bytes, bool) or not isinstance(file_bytes, int) or file_bytes < 1:
        raise SettingsError(f"file_bytes must be a whole number of at least 1; found {file_bytes!r}")
    group = Group.current()
    group.finish_background()

    def check() -> None:
        if (name := first_not_finite(tensors.items())) is not None:
            raise NotFiniteError(
                f"{name!r} holds nan or inf, and its file would take the place of a good one: go back to the last "
                "good weights"
            )

    group.together("looking at weights", check)
    return write_weights(_Running(tensors, dtype, group.rank), directory, group=group, file_bytes=file_bytes, stem=stem)


class _Running:
    """Tensors of a running model, as a `Source`."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, rank: int) -> None:
        self._own = tensors
        self._rank = rank
        self.tensors: Mapping[str, Tensor] = {
            name: torch.empty(
                tensor.shape, dtype=dtype if dtype and tensor.is_floating_point() else tensor.dtype, device="meta"
            )
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def runs(self, name: str, together: bool) -> Iterator[tuple[int, Tensor]]:
        tensor = self._own[name]
        if together and isinstance(tensor, SlicedTensor) and _lies_in_order(tensor):
            yield _share(tensor)
            return
        whole: Any = gather_slices(tensor) if isinstance(tensor, SlicedTensor) else tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if self._rank == 0:
            yield 0, whole.reshape(-1)


def _lies_in_order(tensor: SlicedTensor) -> bool:
    """Whether a slice is a run of the row-major tensor: not of one in channels_last, or cut by tensor parallelism."""
    slicing = tensor.slicing
    return slicing.spec is None and slicing.memory_order == list(range(len(slicing.shape)))


def _share(tensor: SlicedTensor) -> tuple[int, Tensor]:
    """This rank's part of a slice, which ranks on replicate axes hold too."""
    engine = tensor._engine() if tensor._engine is not None else None
    place, copies = 0, 1
    if isinstance(engine, Engine):
        for axis in engine.mesh.replicate:
            place, copies = place * axis.size + axis.rank, copies * axis.size
    numel = tensor.slicing.numel
    begin, end = numel * place // copies, numel * (place + 1) // copies
    return tensor.slicing.start + begin, tensor.local[begin:end]


def config_files(model: nn.Module) -> dict[str, bytes]:
    """The config files of a model of transformers, by name; none of any other."""
    found = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_json = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(to_json):
            found[name] = str(to_json()).encode()
    return found


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    """A config that names the dtype of the weights beside it."""
    settings = {key: value for key, value in config.items() if key != "torch_dtype"}
    settings["dtype"] = str(dtype).removeprefix("torch.")
    return (json.dumps(settings, indent=2) + "\n").encode()


def _write_configs(model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
    for name, content in config_files(model).items():
        if name == "config.json" and dtype is not None:
            content = with_dtype(json.loads(content), dtype)
        (directory / name).write_bytes(content)
