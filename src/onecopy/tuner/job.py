"""Job: a config of `onecopy train` as a workload, and a candidate as such a config.

A probe builds, shards, clips and steps with the training job's own functions. It draws random tokens and reads no text:
what is computed is the same.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from onecopy.errors import SettingsError
from onecopy.planner.answer.describe import transformer_of
from onecopy.planner.engine.simulate import Batch
from onecopy.planner.model.shape import Transformer
from onecopy.recipes.checks import check, resolve
from onecopy.recipes.config import Checkpoint, Config, Run
from onecopy.recipes.model import build_architecture
from onecopy.recipes.schedule import build_optimizer
from onecopy.recipes.settings import toml
from onecopy.recipes.sharded import shard_as
from onecopy.recipes.tokenizer import ByteTokenizer, load_tokenizer
from onecopy.recipes.world import World
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.workload import Workload


@dataclass(frozen=True)
class TrainingJob(Workload):
    """What `onecopy train` would run.

    Attributes:
        config: one that `recipes.checks.resolve` returned.
        states: the directory for states on a disk.

    Raises:
        SettingsError: if the config trains with Muon.
    """

    config: Config
    states: str = ""

    def __post_init__(self) -> None:
        if self.config.optimizer.optimizer != "adamw":
            raise SettingsError(
                "onecopy tune measures AdamW, and optimizer.optimizer is 'muon': tune with 'adamw', from which Muon "
                "differs in the optimizer's step alone, and train with 'muon'"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        small = self.config.model
        return small.path or f"GPT-2 of {small.layers} layers, hidden {small.hidden}"

    @property
    def precision(self) -> str:  # type: ignore[override]
        return self.config.parallel.precision

    @property
    def implementation(self) -> str:  # type: ignore[override]
        return self.config.optimizer.implementation

    @cached_property
    def vocabulary(self) -> int:
        """Tokens of the data, the most of them where the tokenizer is yet to be trained."""
        data = self.config.data
        if data.tokenizer == "bytes":
            return ByteTokenizer.vocabulary
        return data.vocabulary if data.tokenizer == "train" else load_tokenizer(data.tokenizer).vocabulary

    def build(self) -> nn.Module:
        return build_architecture(self.config, self.vocabulary)

    def batch(self, samples: int) -> Batch:
        tokens = torch.randint(0, self.vocabulary, (samples, self.config.data.sequence_length))
        return {"input_ids": tokens, "labels": tokens}

    def shard(self, model: nn.Module, candidate: Candidate, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = configured(self.config, candidate, self.states)
        return shard_as(config, world, model), build_optimizer(model.parameters(), config.optimizer)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.optimizer.clip_norm or math.inf)
        super().update(model, optimizer)

    def warm(self) -> None:
        with torch.device("meta"):
            self.build()

    @property
    def transformer(self) -> Transformer | None:
        small, path = self.config.model, Path(self.config.model.path)
        if not small.path:
            return Transformer(small.layers, small.hidden, small.heads, self.vocabulary)
        file = path / "config.json" if path.is_dir() else path
        return transformer_of(json.loads(file.read_text(encoding="utf-8")))

    def identity(self) -> dict[str, Any]:
        kept = self.config.model_dump(include={"model", "data", "parallel", "optimizer"})
        for decided in ("stage", "accumulate", "replicate", "tensor", "prefetch", "bucket_bytes", "units", "ranks"):
            del kept["parallel"][decided]
        return super().identity() | {"config": kept}


def job_of(config: Config, states: str = "") -> TrainingJob:
    """The workload of a config as a user wrote it.

    Raises:
        SettingsError: if the job cannot run, whatever is tuned.
    """
    config = resolve(config)
    # What is to be found may not fit together yet, and of what a run leaves behind nothing is made.
    plain = Candidate(0, 1, 1, int(os.environ.get("WORLD_SIZE", 1)))
    kept = config.model_copy(update={"run": Run(), "checkpoint": Checkpoint()})
    check(configured(kept, plain, ""))
    return TrainingJob(kept, states)


def configured(config: Config, candidate: Candidate, states: str) -> Config:
    """The config with what the candidate decides."""
    recompute: bool | str = candidate.checkpointing != "off"
    if candidate.checkpointing == "selective":
        recompute = "selective"
    place = "cpu" if candidate.offload.endswith("cpu") else states
    parameters = candidate.offload.startswith("parameters")
    cuts = candidate.checkpointing.startswith("P_a")
    changes: dict[str, dict[str, Any]] = {
        "data": {"batch": candidate.samples},
        "parallel": {
            "stage": candidate.stage,
            "ranks": candidate.ranks,
            "replicate": candidate.replicate,
            "tensor": candidate.tensor,
            "accumulate": candidate.accumulate,
            "prefetch": candidate.prefetch,
            "bucket_bytes": candidate.bucket_bytes,
            "units": candidate.units,
        },
        "activations": {
            "recompute": recompute,
            "partition": cuts or not recompute or candidate.tensor == 1,
            "keep_on": "cpu" if candidate.checkpointing.endswith("+cpu") else "device",
        },
        "offload": {
            "optimizer_on": "device" if candidate.offload == "none" else place,
            "parameters_on": place if parameters else "device",
            "units_ahead": candidate.prefetch if parameters else 1,
        },
    }
    parts = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=parts)


def check_candidate(config: Config, candidate: Candidate, states: str) -> str | None:
    """Why `onecopy train` would refuse the candidate; None if it would not."""
    try:
        check(configured(config, candidate, states))
    except SettingsError as error:
        return str(error)
    return None


def keys_to_paste(config: Config, candidate: Candidate, states: str) -> str:
    """The keys of `onecopy train`'s config that the candidate decides, as TOML."""
    chosen = configured(config, candidate, states)
    lines = []
    for section, names in _DECIDED.items():
        values = getattr(chosen, section)
        usual = type(values)()
        rows = [
            f"{name} = {toml(getattr(values, name))}"
            for name in names
            # What is always decided, and what differs from what holds where nothing is said.
            if name in _ALWAYS or getattr(values, name) != getattr(usual, name)
        ]
        if rows:
            lines += [f"[{section}]", *rows, ""]
    return "\n".join(lines)


_DECIDED: Final = {
    "data": ("batch",),
    "parallel": ("stage", "ranks", "replicate", "tensor", "accumulate", "prefetch", "bucket_bytes", "units"),
    "activations": ("recompute", "partition", "keep_on"),
    "offload": ("optimizer_on", "parameters_on", "units_ahead"),
}
_ALWAYS: Final = ("batch", "stage", "ranks", "accumulate")
