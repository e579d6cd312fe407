"""The engine: a sharded model, its optimizer and its schedule behind DeepSpeed's calls. `initialize.py` makes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from onecopy.checkpoint.claim import release
from onecopy.checkpoint.directory import is_checkpoint
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.load import load
from onecopy.checkpoint.save import save
from onecopy.checkpoint.whole import whole_model
from onecopy.compat.deepspeed.config import Config
from onecopy.compat.deepspeed.scaling import Scaler
from onecopy.errors import CheckpointError, SettingsError, UsageError
from onecopy.untrusted import LONGEST_NAME, Refused, plain_name, read_plain

_log = logging.getLogger("onecopy.compat.deepspeed")

_LATEST: Final = "latest"


class Engine(nn.Module):
    """What `initialize` returns first. Its attributes are DeepSpeed's; those it lacks are the model's.

    Attributes:
        module: the sharded model.
        optimizer: as the program gave it, or made from the config; None for a model that is not trained.
        lr_scheduler: likewise.
        training_dataloader: over ``training_data``, None without.
        global_steps, micro_steps, skipped_steps: counts. A skipped step is one of fp16 whose gradients overflowed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: Any,
        data: Any,
        config: Config,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.training_dataloader = data
        self.device = device
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._settings = config
        self._scaler = Scaler(config.scale) if config.scale is not None else None
        self._norm: float | None = None
        self._applied = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(
            f"neither this engine nor its model, a {type(module).__name__}, has {name!r}: the engine has those of "
            "DeepSpeed's attributes that docs/reference/integrations.md lists"
        )

    # --- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a micro-batch's loss, divided by a step's micro-batches unless ``scale_wrt_gas`` is False."""
        if not isinstance(loss, Tensor):
            raise UsageError(f"engine.backward takes the loss, a tensor that requires a gradient; found {loss!r}")
        scaled = loss / self._settings.accumulate if scale_wrt_gas else loss
        (scaled * self._scaler.scale if self._scaler else scaled).backward(retain_graph=retain_graph)
        return scaled

    def step(self) -> None:
        """After each backward. At a step's last micro-batch gradients are clipped and the optimizer steps."""
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._step()
            self.global_steps += 1
            self.global_samples += self._settings.train_batch
            if (every := self._settings.print_every) and self.global_steps % every == 0:
                _log.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())
        self.micro_steps += 1

    def _step(self) -> None:
        if self.optimizer is None:
            raise UsageError(
                "the engine has no optimizer to step: pass initialize(optimizer=), or name an optimizer in the config"
            )
        gradients = [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        scale = self._scaler.scale if self._scaler else 1.0
        norm = float(get_total_norm(gradients)) / scale
        overflow = self._scaler is not None and not torch.tensor(norm).isfinite()
        if overflow:
            self.skipped_steps += 1
        else:
            self._norm = norm
            clip = self._settings.clip
            factor = min(1.0, clip / (norm + 1e-6)) / scale if clip else 1 / scale
            if factor != 1:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
            self._applied = True
        self.optimizer.zero_grad()
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of its step."""
        return (self.micro_steps + 1) % self._settings.accumulate == 0

    def no_sync(self) -> AbstractContextManager[None]:
        """Micro-batches inside are not the last one of a step."""
        found: AbstractContextManager[None] = self.module.no_sync()  # type: ignore[operator]
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    # --- what was set, and how training stands

    def gradient_accumulation_steps(self) -> int:
        return self._settings.accumulate

    def train_batch_size(self) -> int:
        return self._settings.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._settings.micro_batch

    def gradient_clipping(self) -> float:
        return self._settings.clip

    def zero_optimization_stage(self) -> int:
        return self._settings.stage

    def fp16_enabled(self) -> bool:
        return self._settings.half is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self._settings.half is torch.bfloat16

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, before clipping; None before the first."""
        return self._norm

    def set_lr(self, rate: float) -> None:
        """The learning rate of all groups, until a schedule sets another."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = rate

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum, of each group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed parameters: at a boundary, and without overflow."""
        return self._applied

    def zero_optimization(self) -> bool:
        return self._settings.stage > 0

    def dynamic_loss_scale(self) -> bool:
        return self._settings.scale is not None and not self._settings.scale.static

    def optimizer_name(self) -> str | None:
        return self._settings.optimizer["type"] if self._settings.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        return self._settings.scheduler["type"] if self._settings.scheduler is not None else None

    def loss_scale(self) -> float:
        return self._scaler.scale if self._scaler else 1.0

    @property
    def cur_scale(self) -> float:
        return self.loss_scale()

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.global_rank))

    def destroy(self) -> None:
        """Nothing is left behind that would have to be taken down."""

    # --- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint of onecopy's in ``save_dir/tag``; ``save_dir/latest`` names it. Every rank calls it.

        Args:
            tag: None makes "global_step" and the step's number.
            client_state: given back by `load_checkpoint`: plain types and tensors, the first rank's.
        """
        name = plain_tag(tag if tag is not None else f"global_step{self.global_steps}")
        place = Path(save_dir) / name
        counts = {what: getattr(self, what) for what in _COUNTS}
        scale = self._scaler.state_dict() if self._scaler else None
        save(
            place,
            self.module,
            self.optimizer,
            scheduler=self.lr_scheduler,
            extra={"client": dict(client_state or {}), "counts": counts, "scale": scale},
            step=self.global_steps,
            keep=1,
            trainable_only=exclude_frozen_parameters,
        )
        release(place)
        if save_latest:
            Group.current().on_first("naming the latest checkpoint", lambda: _write_latest(Path(save_dir), name))
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, at any stage and number of ranks. Every rank calls it.

        Args:
            tag: None takes what ``load_dir/latest`` names.

        Returns:
            The checkpoint and its ``client_state``; None twice where there is no ``latest``.

        Raises:
            CheckpointError: if there is none of that tag, or it is DeepSpeed's own.
        """
        root = Path(load_dir)
        name = plain_tag(tag) if tag is not None else Group.current().on_first("looking", lambda: _read_latest(root))
        if name is None:
            _log.warning("there is no file %s: nothing is loaded", root / _LATEST)
            return None, None
        place = root / name
        if any(place.glob("*model_states.pt")):
            raise CheckpointError(
                f"{str(place)!r} is a checkpoint of DeepSpeed's own: convert it with onecopy import-deepspeed {root} "
                "OUT, and load OUT"
            )
        if not place.is_dir():
            raise CheckpointError(f"there is no checkpoint {name!r} in {str(root)!r}")
        states = load_optimizer_states and not load_module_only
        found = load(
            place,
            self.module,
            self.optimizer if states else None,
            scheduler=self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None,
            strict=load_module_strict,
        )
        extra = found.extra if isinstance(found.extra, dict) and "counts" in found.extra else {}
        if not load_module_only:
            self.global_steps = found.step
            for what, value in extra.get("counts", {}).items():
                setattr(self, what, value)
            if self._scaler is not None and extra.get("scale"):
                self._scaler.load_state_dict(extra["scale"])
        return str(found.path if is_checkpoint(place) else place), extra.get("client", {})

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights of half width with `torch.save`, on the first rank. Every rank calls it.

        Memory: all weights on the first rank, one at a time on others. `onecopy.save_pretrained` gathers nothing.

        Returns:
            Whether they were saved: not at stage 3 unless the config has
            ``stage3_gather_16bit_weights_on_model_save``.
        """
        if self._settings.stage == 3 and not self._settings.gathers_on_save:
            _log.warning("nothing is saved: set zero_optimization.stage3_gather_16bit_weights_on_model_save")
            return False
        state = whole_model(
            self.module,
            keep=self.global_rank == 0,
            dtype=self._settings.half,
            trainable_only=exclude_frozen_parameters,
        )

        def write() -> None:
            target = Path(save_dir)
            target.mkdir(parents=True, exist_ok=True)
            torch.save(state, target / save_filename)

        Group.current().on_first("saving weights", write)
        return True


_COUNTS: Final = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


def plain_tag(tag: object) -> str:
    """A checkpoint's tag, which is a name in its directory.

    Raises:
        SettingsError: if it is a path, or no name at all.
    """
    try:
        return plain_name(str(tag))
    except Refused as error:
        raise SettingsError(f"a checkpoint's tag must be a plain name: {error}") from None


def _write_latest(directory: Path, name: str) -> None:
    hidden = directory / f".{_LATEST}"
    hidden.write_text(name, encoding="utf-8")
    hidden.replace(directory / _LATEST)


def _read_latest(directory: Path) -> str | None:
    if not (directory / _LATEST).exists():
        return None
    return plain_tag(read_plain(directory / _LATEST, LONGEST_NAME + 1).decode().strip())
