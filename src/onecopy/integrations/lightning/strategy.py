"""What makes Lightning's DDP strategy one of sharded models. The package that it is for comes with the class beside it.

The model is sharded where DDP would wrap it: its weights are there, its optimizers are not. Steps run through the
module's forward, whose hooks make parameters whole. A checkpoint is a directory, or a plain file with whole tensors.

    DIR/lightning.ckpt      what Lightning knows: loops, callbacks, schedulers, hyperparameters
    DIR/state_0/            model and first optimizer, by onecopy.save; state_1 for a second optimizer, and so on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer

from onecopy.checkpoint.claim import release
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.checkpoint.whole import whole_model, whole_optimizer
from onecopy.errors import SettingsError
from onecopy.integrations.lightning.settings import take_settings
from onecopy.integrations.redirect import through_forward
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.setup.api import shard
from onecopy.sharding.setup.whole import materialize

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy

_META: Final = "lightning.ckpt"
_FIT: Final = "fit"


class ShardedStrategy(DDPStrategy if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shards the LightningModule in place; the loop, precision plugins, callbacks and loggers stay Lightning's.

    Args:
        stage: 0 to 3.
        checkpoints: "slices" saves directories that every rank writes; "whole" saves one file as under DDP, for which
            the first rank holds all tensors on the host. Both are loaded, and files that were saved under DDP.
        kwargs: `onecopy.shard`'s other settings, and DDPStrategy's (timeout, process_group_backend, ...).

    Raises:
        SettingsError: for settings that cannot work.
    """

    strategy_name = "onecopy"
    model: Any

    def __init__(self, stage: int = 3, *, checkpoints: str = "slices", **kwargs: Any) -> None:
        self._shard, self._whole = take_settings(stage, checkpoints, kwargs)
        super().__init__(**kwargs)

    # --- setting up

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        metas = {parameter.is_meta for parameter in self.model.parameters()}
        if len(metas) > 1:
            raise SettingsError(
                "some parameters are on meta and others are not: make all of them in configure_model, under "
                'torch.device("meta")'
            )
        on_meta = metas == {True}
        if not on_meta:
            self.model_to_device()
        if find_engine(self.model) is None:
            shard(self.model, **self._shard)
            if on_meta:
                materialize(self.model, self.root_device)
            if (engine := find_engine(self.model)) is not None:
                # Manual training steps and hooks call parts of the module outside of its forward.
                engine.open_parts()
        if trainer.state.fn == _FIT:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read into slices."""
        return True

    def teardown(self) -> None:
        # Not DDP's, which would move the model to the host.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- steps

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's word for micro-batches that are not the last of a step."""
        with self.model.no_sync():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing to prepare."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing to finish."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._run(self.lightning_module.training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run(self.lightning_module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run(self.lightning_module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run(self.lightning_module.predict_step, *args, **kwargs)

    def _run(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.lightning_module.automatic_optimization and step.__name__ == "training_step":
            # It runs backward and steps itself, through the module's own calls.
            return step(*args, **kwargs)
        return through_forward(self.model, step, *args, **kwargs)

    # --- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_model(self.model, keep=self.is_global_zero) if self._whole else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return whole_optimizer(_plain(optimizer), keep=self.is_global_zero) if self._whole else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._whole:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        optimizers = [_plain(one) for one in self.optimizers] if "optimizer_states" in checkpoint else []
        for number, optimizer in enumerate(optimizers or [None]):
            state = path / f"state_{number}"
            save(state, self.model, optimizer, step=checkpoint["global_step"], keep=1)
            release(state)
        if self.is_global_zero:
            super().save_checkpoint(checkpoint, path / _META, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not (path / _META).exists():
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return found
        fits = self.lightning_module.trainer.state.fn == _FIT
        for number, optimizer in enumerate([_plain(one) for one in self.optimizers] if fits else [None]):
            state = path / f"state_{number}"
            if state.is_dir():
                load(state, self.model, optimizer if (path / "state_0").is_dir() else None)
        meta: dict[str, Any] = super().load_checkpoint(path / _META, weights_only)
        return meta

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Empty where the slices have been read already.
        if checkpoint["state_dict"]:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if any(checkpoint["optimizer_states"]):
            super().load_optimizer_state_dict(checkpoint)


def _plain(optimizer: Any) -> Optimizer:
    """The optimizer that Lightning has wrapped."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, Optimizer)
    return found
