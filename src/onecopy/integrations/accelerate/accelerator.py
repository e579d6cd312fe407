"""Accelerator: Accelerate's own, whose `prepare` shards models and whose checkpoints are written in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import accelerate
from accelerate.utils import convert_file_size_to_int
from torch import nn
from torch.optim import Optimizer

from onecopy.checkpoint.claim import release
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.checkpoint.save_pretrained import save_pretrained
from onecopy.checkpoint.whole import whole_model
from onecopy.errors import SettingsError
from onecopy.integrations.accelerate.prepared import is_sharded, plain_optimizer, prepare_model
from onecopy.integrations.accelerate.whole_states import load_whole
from onecopy.integrations.shard_arguments import shard_arguments
from onecopy.sharding.setup.api import shard as shard_model

_STATE: Final = "onecopy"
"""The directory inside a checkpoint of Accelerate's that holds sharded models and their optimizers."""

_PREPARES_OWN: Final = {"optimizer": "prepare() takes the model's optimizer"}


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator over sharded models; what is not said here is as it has it.

    `prepare` shards every model that trains, with its optimizer. `save_state` and `load_state` put sharded models and
    their optimizers into the directory "onecopy" beside what Accelerate saves, in slices, for any stage and number of
    ranks. `save_model` gathers nothing. `get_state_dict` gives whole tensors on the main process, one gathered at a
    time, and nothing on others.

    Args:
        shard: keyword arguments for `onecopy.shard`, such as {"stage": 3} or ``from_accelerate(file).arguments``; None
            leaves models as they come, sharded by `onecopy.shard` or not.

    Raises:
        SettingsError: for an argument that `onecopy.shard` does not take, and if FSDP, DeepSpeed or Megatron is asked
            for too.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _shown: list[Any]
    """What hooks of a save or load are given: all models. They take out of it what is not to be loaded."""

    def __init__(self, *args: Any, shard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._shard = shard_arguments(shard, _PREPARES_OWN) if shard is not None else None
        if self._shard is not None and "stage" not in self._shard:
            raise SettingsError('shard= must hold a stage: shard={"stage": 3}, 2, 1 or 0')
        steps = self._shard.pop("accumulate", 1) if self._shard is not None else 1
        # accumulate() says which micro-batch is the last, so it has to know how many there are.
        if steps > 1 and kwargs.setdefault("gradient_accumulation_steps", steps) != steps:
            raise SettingsError(
                f"shard= has accumulate={steps}, but gradient_accumulation_steps is "
                f"{kwargs['gradient_accumulation_steps']}: leave one of them out"
            )
        super().__init__(*args, **kwargs)
        if self.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise SettingsError(
                f"onecopy shards the models, so Accelerate must not use {self.distributed_type.value} too: take it "
                "out of Accelerate's settings"
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if self._shard is not None:
            here = [plain_optimizer(one) for one in (*args, *self._optimizers) if isinstance(one, Optimizer)]
            optimizers = list({id(one): one for one in here}.values())
            for model in args:
                trains = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
                if trains and not is_sharded(model):
                    if self.device_placement and not any(p.is_meta for p in model.parameters()):
                        model.to(self.device)
                    shard_model(model, optimizer=_only(_holding(optimizers, model)), **self._shard)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        return prepare_model(self, model, device_placement, evaluation_mode)

    # --- checkpoints

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        places: list[str] = []
        with self._without_sharded() as sharded:
            told = super().register_save_state_pre_hook(lambda models, weights, place: places.append(place))
            with _removed(told):
                saved = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (model, optimizer) in enumerate(sharded):
            place = Path(places[-1]) / _STATE / f"model_{number}"
            save(place, model, optimizer, keep=1)
            release(place)
        return saved

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        places: list[Path] = []
        everything, optimizers = self._models, self._optimizers

        def told(models: list[Any], place: str) -> None:
            # The last hook: Accelerate loads into these lists once it has returned.
            places.append(Path(place))
            if (places[-1] / _STATE).is_dir():
                models[:] = [model for model in self._shown if not is_sharded(model)]
            else:
                # Saved under DDP. Optimizers cut what they are given at their next step.
                for number, model in enumerate(everything):
                    if model in self._shown:
                        load_whole(self.unwrap_model(model), places[-1], number)
                models.clear()
                self._optimizers[:] = optimizers

        with self._without_sharded() as sharded, _removed(super().register_load_state_pre_hook(told)):
            super().load_state(input_dir, load_kwargs, **kwargs)
        if (places[-1] / _STATE).is_dir():
            for number, (model, optimizer) in enumerate(sharded):
                load(places[-1] / _STATE / f"model_{number}", model, optimizer)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        def shown_all(models: list[Any], weights: list[Any], place: str) -> None:
            """Sharded models with the others; their weights are no dict for Accelerate to write, and stay empty."""
            own = {id(model): weight for model, weight in zip(models, weights, strict=True)}
            shown = [own.get(id(model), {}) for model in self._shown]
            hook(list(self._shown), shown, place)
            weights[:] = [weight for weight in weights if any(weight is one for one in shown)]

        return super().register_save_state_pre_hook(shown_all)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        return super().register_load_state_pre_hook(lambda models, place: hook(self._shown, place))

    @contextmanager
    def _without_sharded(self) -> Iterator[list[tuple[nn.Module, Optimizer | None]]]:
        """Accelerate knows plain models and their optimizers alone inside the block, which is given the others."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if is_sharded(model)]
        plain = [plain_optimizer(one) for one in optimizers]
        taken = {id(one) for model in sharded for one in _holding(plain, model)}
        self._shown = list(models)
        self._models = [model for model in models if not is_sharded(model)]
        self._optimizers = [one for one in optimizers if id(plain_optimizer(one)) not in taken]
        try:
            yield [(model, _only(_holding(plain, model))) for model in sharded]
        finally:
            self._models, self._optimizers = models, optimizers

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        if not is_sharded(model) or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        save_pretrained(model, save_directory, file_bytes=convert_file_size_to_int(max_shard_size))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return whole_model(model, keep=self.is_main_process)


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    """The hook is there inside the block alone."""
    try:
        yield
    finally:
        handle.remove()


def _holding(optimizers: list[Optimizer], model: nn.Module) -> list[Optimizer]:
    own = {id(parameter) for parameter in model.parameters()}
    return [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]


def _only(optimizers: list[Optimizer]) -> Optimizer | None:
    if len(optimizers) > 1:
        raise SettingsError(
            f"only one optimizer can hold the parameters of a model; found {len(optimizers)}: make one optimizer, "
            "with a group for each of them"
        )
    return optimizers[0] if optimizers else None
