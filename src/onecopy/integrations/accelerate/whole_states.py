"""Weights that Accelerate saved of models that were not sharded, under DDP for instance."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn

from onecopy.checkpoint.names import name_tensors
from onecopy.errors import CheckpointError

_WRAPPED: Final = "module."
"""What DDP puts before names."""


def load_whole(model: nn.Module, directory: Path, number: int) -> None:
    """Load the weights of the model that was prepared as ``number``; of whole tensors each rank keeps its slices.

    Memory: all weights, on every rank, on the host.

    Raises:
        CheckpointError: if there is no such file, or names differ.
    """
    whole = _read(directory, f"_{number}" if number else "")
    if whole and all(name.startswith(_WRAPPED) for name in whole):
        whole = {name.removeprefix(_WRAPPED): tensor for name, tensor in whole.items()}
    differing = model.load_state_dict(whole, strict=False)
    tied = name_tensors(model).aliases
    there = {*whole, *(tied.get(name, name) for name in whole)}
    missing = [name for name in differing.missing_keys if tied.get(name, name) not in there]
    if missing or differing.unexpected_keys:
        raise CheckpointError(
            f"the weights in {str(directory)!r} are not those of model {number}: it lacks {missing or 'nothing'}, and "
            f"has {differing.unexpected_keys or 'nothing'} too many"
        )


def _read(directory: Path, ending: str) -> dict[str, Tensor]:
    for file in (directory / f"{SAFE_MODEL_NAME}{ending}.safetensors", directory / f"{MODEL_NAME}{ending}.bin"):
        if file.exists():
            found: dict[str, Tensor] = (
                load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            )
            return found
    raise CheckpointError(
        f"{str(directory)!r} holds neither the directory onecopy nor {SAFE_MODEL_NAME}{ending}.safetensors: give a "
        "directory that save_state wrote"
    )
