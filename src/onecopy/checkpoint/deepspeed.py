"""import_deepspeed: ZeRO checkpoints of DeepSpeed (stages 1, 2 and 3), weights and optimizer states.

What each stage leaves on disk, read from checkpoints that DeepSpeed 0.19.8 wrote:

    mp_rank_00_model_states.pt                       stages 1, 2: names, shapes, buffers, frozen weights
    zero_pp_rank_R_mp_rank_00_model_states.pt        stage 3: the same, on each rank R
    zero_pp_rank_R_mp_rank_00_optim_states.pt        flat fp32 weights and states, by group (bf16_... likewise)

Files are mapped, not read, and tensors are put together one at a time as they are written. Nothing in a file can run
code: they are unpickled with `weights_only`, and the few classes of DeepSpeed in them by stand-ins of our own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from onecopy.checkpoint.deepspeed_layout import FlatStates, Place, find_places, join
from onecopy.checkpoint.manifest import LARGEST
from onecopy.checkpoint.random import pack
from onecopy.checkpoint.storage import LazyTensor
from onecopy.checkpoint.values import load_values
from onecopy.checkpoint.writing import Contents, write
from onecopy.comm.objects import bytes_of
from onecopy.errors import CheckpointError
from onecopy.untrusted import LONGEST_NAME, plain_name, plain_size, read_plain, reason

_OPTIM: Final = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ALLOWED: Final = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass(frozen=True)
class Imported:
    """What was made: the checkpoint, its step, and of what: ZeRO's stage, ranks, elements of parameters."""

    path: Path
    step: int
    stage: int
    ranks: int
    parameters: int


class _StandIn:
    """What a class of DeepSpeed is read as: its arguments and attributes, without its code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


_STAND_INS: Final[list[Any]] = [(type(name.rpartition(".")[2], (_StandIn,), {}), name) for name in _ALLOWED]


def import_deepspeed(directory: str | Path, out: str | Path) -> Imported:
    """Turn what DeepSpeed's `save_checkpoint` wrote into a checkpoint of onecopy. One process calls it.

    Weights are the fp32 masters. Memory: one tensor.

    Args:
        directory: the one given to `save_checkpoint`, of which `latest` names the tag; or that of one tag.
        out: a directory of onecopy checkpoints; it gets one more.

    Raises:
        CheckpointError: if it is no ZeRO checkpoint, files are missing, or it is of a kind that is not read: tensor or
            pipeline parallel, experts, states offloaded to NVMe.
    """
    tag = _find_tag(Path(directory))
    with _expecting(tag):
        optim = [_open(path)["optimizer_state_dict"] for path in _optim_files(tag)]
        stage, ranks = _stage(tag, optim)
        model = [_open(path) for path in _model_files(tag, stage, ranks)]
        flat = _flat(tag, optim, stage)
        places = find_places(model[0]["param_shapes"], ranks, stage)
        groups = [list(shapes) for shapes in model[0]["param_shapes"]]

        def lazy(place: Place, make: Callable[[Place], Tensor]) -> LazyTensor:
            return LazyTensor(place.shape, torch.float32, partial(make, place))

        tensors: dict[str, Any] = {name: lazy(place, flat.weight) for name, place in places.items()}
        if stage == 3:
            for name, shape in (model[0].get("frozen_param_shapes") or {}).items():
                parts = [rank["frozen_param_fragments"][name] for rank in model]
                tensors[name] = LazyTensor(shape, parts[0].dtype, partial(join, parts, shape))
        tied = dict(model[0].get("shared_params") or {})
        buffers = set(model[0].get("buffer_names") or [])
        for name, value in model[0]["module"].items():
            # Frozen weights are whole at stages 1 and 2, as buffers are at any.
            if name not in tensors and name not in tied and (stage != 3 or name in buffers):
                tensors[name] = LazyTensor(value.shape, value.dtype, value.clone)
        parameters = sum(tensor.shape.numel() for name, tensor in tensors.items() if name not in buffers)
        states = {
            name: {key: lazy(place, partial(flat.state, key)) for key in flat.state_names}
            for name, place in places.items()
        }
        job = {
            "aliases": tied,
            "objects": {},
            "optimizer": flat.describe(groups),
            "extra": None,
        }
        step = int(model[0].get("global_steps") or 0)
        if not 0 <= step < LARGEST:
            raise CheckpointError(f"{tag}: its number of steps must be from 0 to 2**53; found {step}")
        facts = {"sharded_by": "DeepSpeed", "deepspeed": model[0].get("ds_version"), "stage": stage, "shard": ranks}
        contents: Contents = {"model": tensors, "optimizer": {"state": states}}
        aliases = {f"model.{alias}": f"model.{name}" for alias, name in tied.items()}
        packed = bytes_of(pack(job))
    saving = write(Path(out), contents, aliases, packed, {}, step=step, saved_by={**facts, "parameters": parameters})
    return Imported(saving.wait(), step, stage, ranks, parameters)


# --- files


@contextmanager
def _expecting(what: Path) -> Iterator[None]:
    """Inside the block, values of ``what`` are taken for what DeepSpeed writes; it is one message if they are not."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, AssertionError) as error:
        found = f"there is no {error}" if isinstance(error, KeyError) else reason(error)
        raise CheckpointError(f"{what} does not hold what DeepSpeed writes: {found}") from None


def _find_tag(directory: Path) -> Path:
    latest = directory / "latest"
    tag = directory
    if os.path.lexists(latest):
        try:
            tag = directory / plain_name(read_plain(latest, LONGEST_NAME + 1).decode().strip())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(latest)!r} names no checkpoint of DeepSpeed: {reason(error)}") from None
    if not tag.is_dir() or (tag != directory and tag.is_symlink()):
        raise CheckpointError(f"there is no checkpoint of DeepSpeed in {str(tag)!r}")
    return tag


def _optim_files(tag: Path) -> list[Path]:
    found = {path: match for path in tag.iterdir() if (match := _OPTIM.fullmatch(path.name))}
    if not found:
        raise CheckpointError(
            f"{tag}: there is no zero_pp_rank_*_optim_states.pt; onecopy reads only checkpoints of ZeRO stages 1, 2 "
            "and 3"
        )
    if any(int(match[3]) for match in found.values()) or any(tag.glob("layer_*")) or any(tag.glob("*expert*")):
        raise CheckpointError(f"{tag}: onecopy does not read tensor parallel, pipeline parallel and expert checkpoints")
    return sorted(found, key=lambda path: int(found[path][2]))


def _model_files(tag: Path, stage: int, ranks: int) -> list[Path]:
    names = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    # With bf16 weights and no fp16 engine the names begin otherwise.
    paths = [path if (path := tag / name).exists() else tag / f"bf16_{name}" for name in names]
    if missing := [path.name for path in paths if not path.exists()]:
        raise CheckpointError(f"{tag}: {', '.join(name.removeprefix('bf16_') for name in missing)} is missing")
    return paths


def _open(path: Path) -> dict[str, Any]:
    try:
        plain_size(path)
        content = load_values(path, mmap=True, stand_ins=_STAND_INS)
    except (OSError, ValueError) as error:
        found = reason(error)
        hint = "; take it out of the client state, or of the optimizer, and save again" if "run code" in found else ""
        raise CheckpointError(f"{path} cannot be read: {found}{hint}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold what DeepSpeed writes: found {type(content).__name__}")
    return content


def _stage(tag: Path, optim: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """ZeRO's stage, and how many ranks there were."""
    # Its bf16 optimizer, which is stage 1, says none.
    stage = optim[0].get("zero_stage", 1 if "single_partition_of_fp32_groups" in optim[0] else 0)
    number = int(stage.arguments[0]) if isinstance(stage, _StandIn) else int(stage)
    counts = optim[0].get("partition_count")
    ranks = max(counts) if isinstance(counts, list | tuple) else int(counts or 0)
    if number not in (1, 2, 3):
        raise CheckpointError(f"{tag}: its optimizer states must name ZeRO stage 1, 2 or 3; found {number}")
    if ranks != len(optim):
        raise CheckpointError(
            f"{tag}: it was saved by {ranks} ranks, but there are optimizer states of {len(optim)} ranks"
        )
    return number, ranks


def _flat(tag: Path, optim: Sequence[Mapping[str, Any]], stage: int) -> FlatStates:
    weights_key, states_key = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    base = [rank[states_key] for rank in optim]
    if not all(isinstance(one, dict) and "state" in one for one in base):
        raise CheckpointError(
            f"{tag}: its optimizer states are those of an elastic checkpoint, which onecopy does not read"
        )
    weights = [list(rank[weights_key]) for rank in optim]
    states = [[one["state"][key] for key in sorted(one["state"])] for one in base]
    for own, state in zip(weights, states, strict=True):
        if len(own) != len(state):
            raise CheckpointError(
                f"{tag}: it has {len(own)} groups of weights but {len(state)} groups of optimizer states"
            )
    return FlatStates(weights, states, base[0]["param_groups"], stage)
