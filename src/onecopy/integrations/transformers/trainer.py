"""ShardedTrainer: a mixin that shards the model of a Trainer, and saves and resumes it in slices.

It goes before the class that trains, and works through methods that Trainer offers for overriding alone:

    __init__, create_optimizer            shard, once the model is complete (TRL has added adapters by then)
    create_accelerator_and_postprocess    the Trainer's accelerator leaves sharded models unwrapped
    save_model, _save_...                 every rank writes its slices
    _load_...                             every rank reads its slices
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from onecopy.checkpoint.claim import release
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.errors import SettingsError, UsageError
from onecopy.integrations.accelerate.prepared import is_sharded, plain_optimizer, prepare_model
from onecopy.integrations.shard_arguments import shard_arguments
from onecopy.integrations.transformers.weights import (
    STATE,
    adapters_of,
    placeholders,
    read_weights,
    whole_for_saving,
    write_slices_together,
    writes_slices,
)
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.setup.api import shard as shard_model
from onecopy.sharding.setup.needs import needs_whole
from onecopy.sharding.setup.whole import gathered
from onecopy.sharding.tensor.sliced import SlicedTensor

# Its step takes means over rows, columns and all of a parameter, and nothing over several.
needs_whole(transformers.Adafactor)

_TRAINERS_OWN = {
    "accumulate": "args.gradient_accumulation_steps says how many micro-batches a step has",
    "optimizer": "Trainer's optimizers= takes an optimizer that exists",
}


def sharded(trainer: type, **shard: Any) -> type:
    """A Trainer class like ``trainer`` whose models are sharded.

    Args:
        shard: keyword arguments for `onecopy.shard`, of which each object may give others in its own ``shard=``.

    Raises:
        SettingsError: if ``trainer`` is no class of Trainers, or for an argument that `onecopy.shard` does not take.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise SettingsError(f"sharded() takes a class of Trainers, such as transformers.Trainer; found {trainer!r}")
    defaults = shard_arguments(shard, _TRAINERS_OWN)
    return type(f"Sharded{trainer.__name__}", (ShardedTrainer, trainer), {"_shard_defaults": defaults})


class ShardedTrainer(transformers.Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin, before a Trainer class: its model is sharded once it is complete.

    A reference model (DPO, GRPO) is sharded too where parameters are. Every rank calls the model's `generate`, which
    runs with whole parameters, gathered once for each call, and its `save_pretrained`. Checkpoints hold weights as
    `from_pretrained` loads them, written by all ranks, and in the directory "onecopy" what training goes on with, at
    any stage and number of ranks. A checkpoint of a Trainer under DDP is taken too, moments included.

    Args:
        shard: keyword arguments for `onecopy.shard`, {"stage": 3} for instance; None if the model is sharded already.

    Raises:
        SettingsError: for an argument that is unknown or Trainer's own to decide, or if FSDP or DeepSpeed is asked for
            too.
    """

    _shard_defaults: Mapping[str, Any] = {}

    def __init__(self, *args: Any, shard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._shard = {**self._shard_defaults, **shard_arguments({} if shard is None else shard, _TRAINERS_OWN)}
        super().__init__(*args, **kwargs)
        self._refuse_another_stage()
        if self.model_init is None:
            self._ensure_sharded()
        self._shard_reference()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kinds = cls.__mro__
        if transformers.Trainer in kinds and kinds.index(transformers.Trainer) < kinds.index(ShardedTrainer):
            raise SettingsError(
                f"ShardedTrainer must stand before the class that trains: "
                f"class {cls.__name__}(ShardedTrainer, {cls.__bases__[0].__name__})"
            )

    def _refuse_another_stage(self) -> None:
        engine = find_engine(self.model) if isinstance(self.model, nn.Module) else None
        asked = self._shard.get("stage")
        if engine is not None and asked is not None and asked != engine.stage.number:
            raise SettingsError(
                f"shard= asks for stage {asked}, but the model is sharded already, at stage {engine.stage.number}: "
                "leave shard= out, or give a model that is not sharded"
            )

    def create_accelerator_and_postprocess(self) -> None:
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, name):
                raise SettingsError(
                    f"args.{name} would change the dtype of sharded parameters: leave it out. args.bf16=True or "
                    'shard={"precision": "bf16", ...} evaluates in bf16 too'
                )
        _refuse_others(fsdp=self.args.fsdp, deepspeed=self.args.deepspeed)
        super().create_accelerator_and_postprocess()
        _refuse_others(fsdp=self.is_fsdp_enabled, deepspeed=self.is_deepspeed_enabled)
        self.accelerator.prepare_model = MethodType(prepare_model, self.accelerator)

    def create_optimizer(self, *args: Any) -> Any:
        # Here a model of model_init= is complete.
        self._ensure_sharded()
        return super().create_optimizer(*args)

    def _ensure_sharded(self) -> None:
        if not is_sharded(self.model):
            if "stage" not in self._shard:
                raise SettingsError(
                    'this Trainer shards its model: give shard={"stage": 3}, 2, 1 or 0, or a model that '
                    "onecopy.shard has sharded"
                )
            needs = {"whole": lambda name, parameter: True} if self.args.optim == "adafactor" else {}
            shard_model(self.model, optimizer=self.optimizer, **{**needs, **self._shard})
        if hasattr(self.model, "generate") and "generate" not in vars(self.model):
            self.model.generate = partial(_generate, self.model)
        if hasattr(self.model, "save_pretrained") and "save_pretrained" not in vars(self.model):
            self.model.save_pretrained = partial(_save_pretrained, self.model)

    def _shard_reference(self) -> None:
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module) and self._shard.get("stage") == 3 and not is_sharded(reference):
            own = {name: self._shard[name] for name in ("mesh", "precision", "bucket_bytes") if name in self._shard}
            shard_model(reference.requires_grad_(False), stage=3, **own)

    # --- out

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        target = output_dir or self.args.output_dir
        if writes_slices(self.model):
            # Writes config, tokenizer and arguments, and a weights file of placeholders, which the next call replaces.
            self._save(target, state_dict=placeholders(self.model))
            write_slices_together(self.model, Path(target))
        else:
            with whole_for_saving(self.model):
                self._save(target)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = Path(output_dir) / STATE
        save(
            state,
            self.model,
            plain_optimizer(self.optimizer),
            scheduler=self.lr_scheduler,
            step=self.state.global_step,
            keep=1,
            trainable_only=bool(adapters_of(self.model)),
        )
        # Trainer deletes old checkpoints, and a second train() makes them anew.
        release(state)

    # --- in

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._ensure_sharded()
        read_weights(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE).is_dir():
            # Of a run under DDP: whole states, which are cut at the first step.
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(
            Path(checkpoint) / STATE,
            self.model,
            plain_optimizer(self.optimizer),
            scheduler=self.lr_scheduler,
        )

    def _load_best_model(self) -> None:
        if not is_sharded(self.model):
            super()._load_best_model()
        elif self.state.best_model_checkpoint is not None:
            read_weights(self.model, Path(self.state.best_model_checkpoint))


def _refuse_others(**asked: Any) -> None:
    if others := [name for name, found in asked.items() if found]:
        raise SettingsError(
            f"onecopy shards the model, so neither TrainingArguments nor the launcher must ask for {others[0]} too"
        )


def _generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Whole parameters for the length of a call, so that ranks may make different numbers of tokens."""
    with gathered(model), torch.no_grad():
        return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]


def _save_pretrained(model: nn.Module, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
    """The model's own, on every rank: each writes its slices."""
    if kwargs.get("push_to_hub") or kwargs.get("variant"):
        raise UsageError(
            "save_pretrained of a sharded model takes neither push_to_hub= nor variant=: save to a directory, and "
            "upload it with huggingface_hub.upload_folder"
        )
    own: Any = partial(type(model).save_pretrained, model, save_directory)  # type: ignore[attr-defined]
    if "state_dict" in kwargs or not any(isinstance(parameter, SlicedTensor) for parameter in model.parameters()):
        # Trainer's call, or one inside onecopy.gathered.
        own(*args, **kwargs)
    elif writes_slices(model):
        kwargs.setdefault("is_main_process", Group.current().rank == 0)
        own(*args, state_dict=placeholders(model), **kwargs)
        write_slices_together(model, Path(save_directory))
    else:
        with whole_for_saving(model):
            own(*args, **{"is_main_process": Group.current().rank == 0, **kwargs})
