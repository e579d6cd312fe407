"""Checks: what "auto" stands for here, and settings that cannot work, found before any rank starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

from onecopy.errors import SettingsError
from onecopy.memory.store.offload import Offload, Words
from onecopy.planner.model.tensor import check_tensor_parallel
from onecopy.recipes.config import Config
from onecopy.recipes.settings import keys
from onecopy.recipes.texts import find_files
from onecopy.recipes.tokenizer import TOKENIZER_FILES, has_tokenizer
from onecopy.resilience.membership import ADDRESS
from onecopy.stage import Stage
from onecopy.untrusted import read_json, reason


def resolve(config: Config) -> Config:
    """The config with every "auto" but the run directory's replaced by what it stands for here."""
    device = config.parallel.device
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found.type if found else "cpu"
    ranks = config.parallel.ranks
    if ranks == "auto":
        alone = 2 if device == "cpu" else max(1, torch.accelerator.device_count())
        ranks = int(os.environ.get("WORLD_SIZE", alone))
    # Two words for one thing; `check` refuses two numbers.
    copies = config.recovery.copies if config.parallel.replicate == 1 else config.parallel.replicate
    tokenizer = config.data.tokenizer
    if tokenizer == "auto":
        path = Path(config.model.path)
        directory = str(path.parent if path.is_file() else path)
        # Weights were trained on the tokens of their own tokenizer: `_data` refuses them without it.
        with_weights = bool(config.model.path) and path.is_dir()
        tokenizer = directory if with_weights or (config.model.path and has_tokenizer(directory)) else "bytes"
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"device": device, "ranks": ranks, "replicate": copies}),
            "data": config.data.model_copy(update={"tokenizer": tokenizer}),
        }
    )


def check(config: Config) -> None:
    """Find settings that cannot work, as far as they can be known without reading the data.

    Args:
        config: one that `resolve` returned.

    Raises:
        SettingsError: with all that was found, one line each.
    """
    problems = [
        problem
        for find in (
            *(_unused, _activations, _offload, _optimizer, _ranks, _recovery, _device, _model, _data, _evaluation),
            *(_resume, _directory),
        )
        if (problem := find(config))
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def _unused(config: Config) -> str | None:
    """Keys that were changed but do nothing because of another one."""
    reasons = {
        "model.layers": "model.path" if config.model.path else None,
        "model.hidden": "model.path" if config.model.path else None,
        "model.heads": "model.path" if config.model.path else None,
        "data.validation_fraction": "data.validation" if config.data.validation else None,
        "data.vocabulary": "data.tokenizer" if config.data.tokenizer != "train" else None,
        "activations.partition": "activations.recompute" if not config.activations.recompute else None,
        "activations.keep_on": "activations.recompute" if not config.activations.recompute else None,
        "offload.units_ahead": "offload.parameters_on" if config.offload.parameters_on == "device" else None,
        "optimizer.muon_momentum": "optimizer.optimizer" if config.optimizer.optimizer != "muon" else None,
        "recovery.spares": "recovery.mirror" if not config.recovery.is_on else None,
        "recovery.heartbeat": "recovery.mirror" if not config.recovery.is_on else None,
        "schedule.final_fraction": "schedule.decay" if config.schedule.decay == "constant" else None,
        "evaluation.evaluate_batches": "evaluation.evaluate_every" if not config.evaluation.evaluate_every else None,
        "checkpoint.keep": "checkpoint.save_every" if not config.checkpoint.save_every else None,
        "checkpoint.save_in_background": "checkpoint.save_every" if not config.checkpoint.save_every else None,
    }
    for key in keys():
        value = getattr(getattr(config, key.section), key.name)
        if (reason := reasons.get(key.dotted)) and value != key.field.default:
            section, name = reason.split(".")
            return (
                f"{key.dotted} = {value!r} would do nothing beside "
                f"{reason} = {getattr(getattr(config, section), name)!r}; change one of them"
            )
    return None


def _activations(config: Config) -> str | None:
    """What `onecopy.Activations` would refuse once ranks run."""
    chosen = config.activations
    if chosen.recompute != "selective" or chosen.keep_on == "device":
        return None
    return (
        f"activations.keep_on = {chosen.keep_on!r} moves the inputs of blocks; activations.recompute = 'selective' "
        f"keeps what products return too, on the device: set recompute to true, or leave keep_on away"
    )


def offload_of(config: Config) -> Offload | None:
    """What `onecopy.shard` takes as ``offload``."""
    chosen = config.offload
    optimizer, parameters = (
        None if place == "device" else place for place in (chosen.optimizer_on, chosen.parameters_on)
    )
    return Offload(optimizer, parameters, chosen.units_ahead) if optimizer or parameters else None


_WORDS: Final = Words(
    "offload.optimizer_on", "offload.parameters_on", "offload.units_ahead", "parallel.stage", '"device"'
)
"""What `onecopy.Offload` calls otherwise."""


def _offload(config: Config) -> str | None:
    """What `onecopy.Offload` would refuse once ranks run."""
    if (offload := offload_of(config)) is None:
        return None
    try:
        offload.check(Stage.of(config.parallel.stage), _WORDS)
    except SettingsError as error:
        return str(error)
    return None


def _optimizer(config: Config) -> str | None:
    """What cannot lie whole on one rank, as Muon needs it."""
    if config.optimizer.optimizer != "muon":
        return None
    if config.parallel.tensor > 1:
        return (
            f"optimizer.optimizer = 'muon' needs whole matrices, which parallel.tensor = {config.parallel.tensor} cuts "
            f"over ranks; leave one of them away"
        )
    return None


def _ranks(config: Config) -> str | None:
    parallel = config.parallel
    assert isinstance(parallel.ranks, int)
    started = int(os.environ.get("WORLD_SIZE", parallel.ranks))
    if started != parallel.ranks:
        return f"parallel.ranks is {parallel.ranks} but torchrun started {started}; leave it at 'auto'"
    if parallel.ranks % parallel.tensor:
        return f"parallel.ranks ({parallel.ranks}) must be a multiple of parallel.tensor ({parallel.tensor})"
    if parallel.sequence and parallel.tensor == 1:
        return "parallel.sequence cuts over the ranks of parallel.tensor, and there are none: set it to false"
    if parallel.sequence and config.data.sequence_length % parallel.tensor:
        return f"parallel.tensor ({parallel.tensor}) must divide data.sequence_length ({config.data.sequence_length})"
    copies = parallel.ranks // parallel.tensor
    if copies % parallel.replicate:
        divided = "parallel.ranks" if parallel.tensor == 1 else "parallel.ranks / parallel.tensor"
        return f"{divided} ({copies}) must be a multiple of parallel.replicate ({parallel.replicate})"
    if parallel.replicate > 1 and not Stage.of(parallel.stage).shards_optimizer:
        return f"stage {parallel.stage} keeps every state whole on every rank; parallel.replicate must be 1"
    pieces = copies * parallel.accumulate
    if config.data.batch % pieces:
        divided = "parallel.ranks" if parallel.tensor == 1 else "parallel.ranks / parallel.tensor"
        return (
            f"data.batch ({config.data.batch}) must be a multiple of {divided} * parallel.accumulate "
            f"({copies} * {parallel.accumulate} = {pieces})"
        )
    return None


def _recovery(config: Config) -> str | None:
    """What `onecopy.shard(mirror=)` and `onecopy.resilient` would refuse once ranks run."""
    chosen, parallel = config.recovery, config.parallel
    if not chosen.is_on:
        return None
    if chosen.copies > 1 and chosen.copies != parallel.replicate:
        return f"recovery.copies is {chosen.copies} and parallel.replicate {parallel.replicate}: they say the same"
    if chosen.mirror and parallel.replicate > 1:
        return "recovery.mirror is not needed where parallel.replicate or recovery.copies holds every slice twice"
    if chosen.mirror and (not Stage.of(parallel.stage).shards_optimizer or parallel.ranks == 1):
        return f"recovery.mirror has nothing to hold at stage {parallel.stage} on {parallel.ranks} ranks"
    if parallel.tensor > 1 or offload_of(config) is not None:
        return "[recovery] cannot be combined with parallel.tensor or [offload] yet"
    if config.optimizer.optimizer == "muon":
        return "[recovery] cannot be combined with optimizer.optimizer = 'muon' yet"
    if config.checkpoint.save_in_background:
        return "[recovery] cannot be combined with checkpoint.save_in_background yet"
    return None


def _device(config: Config) -> str | None:
    device = config.parallel.device
    if device == "cpu":
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device:
        return f"parallel.device is {device!r} but this host has {found.type if found else 'cpu'!r}"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.ranks))
    if here > torch.accelerator.device_count():
        return f"{here} ranks need as many devices of type {device!r}; found {torch.accelerator.device_count()}"
    return None


def _model(config: Config) -> str | None:
    if not config.model.path:
        if config.model.hidden % config.model.heads:
            return f"model.hidden ({config.model.hidden}) must be a multiple of model.heads ({config.model.heads})"
        # As many tokens as can be divided, see `build_model`.
        small = {"model_type": "gpt2", "n_head": config.model.heads, "vocab_size": config.parallel.tensor}
        return _spread(small, config)
    path = Path(config.model.path)
    settings = path / "config.json" if path.is_dir() else path
    if not settings.is_file():
        return f"model.path must be a directory with a config.json, or such a file; found no {str(settings)!r}"
    if path.is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        return f"{str(path)!r} holds no weights; give {str(settings)!r} as model.path to start from random ones"
    try:
        values = read_json(settings, follow=True)
    except (OSError, ValueError) as error:
        return f"{str(settings)!r} cannot be used: {reason(error)}"
    if not isinstance(values, dict) or "model_type" not in values:
        return f"{str(settings)!r} is no config of transformers: it has no 'model_type'"
    positions = values.get("max_position_embeddings", values.get("n_positions"))
    if isinstance(positions, int) and positions < config.data.sequence_length:
        return f"data.sequence_length is {config.data.sequence_length} but the model has {positions} positions"
    return _spread(values, config)


def _spread(model: dict[str, Any], config: Config) -> str | None:
    parallel = config.parallel
    if parallel.tensor == 1:
        return None
    return check_tensor_parallel(model, parallel.tensor, sequence=parallel.sequence)


def _data(config: Config) -> str | None:
    try:
        find_files(config.data.train)
        find_files(config.data.validation)
    except SettingsError as error:
        return str(error)
    if config.data.tokenizer not in ("bytes", "train") and not has_tokenizer(config.data.tokenizer):
        if config.data.tokenizer == config.model.path:
            return (
                f"the model directory {config.model.path!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)}), and its "
                f"weights know the tokens of no other: put its files there, or name their directory as data.tokenizer"
            )
        return (
            f"data.tokenizer must be 'auto', 'bytes', 'train' or a directory with a tokenizer; "
            f"found {config.data.tokenizer!r}"
        )
    return None


def _evaluation(config: Config) -> str | None:
    if config.evaluation.evaluate_every and not config.data.validation and not config.data.validation_fraction:
        return "there is nothing to evaluate on: set data.validation, or evaluation.evaluate_every = 0"
    return None


def _resume(config: Config) -> str | None:
    resume = config.checkpoint.resume
    if resume == "auto" and config.run.directory == "auto":
        return "checkpoint.resume = 'auto' goes on in run.directory; name it"
    if resume not in ("", "auto") and not Path(resume).is_dir():
        return f"checkpoint.resume must be 'auto', a checkpoint or a directory of them; found {resume!r}"
    return None


def _directory(config: Config) -> str | None:
    directory = Path(config.run.directory)
    if ADDRESS in os.environ and config.run.directory == "auto":
        return "under `onecopy run` a rank that comes later must find the run: set run.directory, on all hosts the same"
    if config.checkpoint.resume == "auto" and (not directory.exists() or directory.is_dir()):
        return None
    # Only the first rank may ask: it is the one that fills the directory. With [recovery] the launcher has made it.
    if ADDRESS in os.environ:
        return None
    if config.run.directory == "auto" or os.environ.get("RANK", "0") != "0" or not directory.exists():
        return None
    if not directory.is_dir() or any(directory.iterdir()):
        return f"run.directory {str(directory)!r} must be new or empty, so that no earlier run is overwritten"
    return None
