"""Lightning's Trainer over sharded models. Oracle: the same module under Lightning's own DDP, in the same fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra 'integrations': lightning is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.errors import SettingsError
from onecopy.integrations.lightning import OnecopyStrategy, strategy_of
from ranks import run_ranks

STAGES = (None, 0, 1, 2, 3)
"""None is DDP."""


class Module(pl.LightningModule):
    """A model with a parameter of its own, which steps use beside the net's forward."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = seeded(Stack)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.net(*batch) * self.scale.sum()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        loss = self.loss(batch)
        self.log("validated", loss, sync_dist=True)
        self.validated.append(loss.item())

    def test_step(self, batch: list[Tensor], number: int) -> None:
        self.log("tested", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], number: int) -> float:
        return self.loss(batch).item()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def data(steps: int = 6) -> DataLoader[Any]:
    batches = vector_batches(steps, rows=4)
    return DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True))), batch_size=2)


def trainer(stage: int | None, folder: Path, **settings: Any) -> pl.Trainer:
    # As torchrun says who is who.
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "default_root_dir": folder, "num_sanity_val_steps": 1}
    strategy = settings.pop("strategy", "ddp" if stage is None else f"onecopy_stage_{stage}")
    if settings.pop("fp16", False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
    return pl.Trainer(strategy=strategy, **{"max_epochs": 1, "enable_checkpointing": False, **quiet, **own, **settings})


def whole(module: Module) -> dict[str, Tensor]:
    if isinstance(module.scale, onecopy.SlicedTensor):
        with onecopy.gathered(module):
            return {name: p.detach().clone() for name, p in module.named_parameters()}
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 4},
        {"fp16": True, "gradient_clip_val": 0.5},
    ],
    ids=["accumulation and clipping", "bf16-mixed, a shorter last step", "fp16 with its loss scale"],
)
def test_training_validation_test_and_prediction(settings: dict[str, Any], tmp_path: Path) -> None:
    def run(rank: int) -> list[Any]:
        found = []
        for stage in STAGES:
            module, own = Module(), trainer(stage, tmp_path, **settings)
            own.fit(module, data(), data(2))
            if "fp16" in settings:
                scale = own.precision_plugin.scaler.get_scale()
                assert 1 < scale < 2.0**18, "a step is skipped, and others are taken"
            if stage is not None:
                assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in module.parameters())
            tested = trainer(stage, tmp_path, **settings).test(module, data(2), verbose=False)[0]["tested"]
            predicted = trainer(stage, tmp_path, **settings).predict(module, data(2))
            found.append((module.losses, module.validated, tested, predicted, whole(module)))
        return found

    rtol = 1e-5 if "accumulate_grad_batches" in settings and "precision" not in settings else 2e-2
    for (losses, validated, tested, predicted, weights), *ours in run_ranks(2, run, timeout=120):
        for own_losses, own_validated, own_tested, own_predicted, own_weights in ours:
            assert own_losses == pytest.approx(losses, rel=rtol)
            assert own_validated == pytest.approx(validated, rel=rtol)
            assert own_tested == pytest.approx(tested, rel=rtol)
            assert own_predicted == pytest.approx(predicted, rel=rtol)
            assert_close(own_weights, weights, rtol=max(rtol, 1e-4))


def test_checkpoints_go_on(tmp_path: Path) -> None:
    """Directories at another stage, whole files in DDP, and DDP's files in slices. Oracle: DDP that never stopped."""

    def fit(
        stage: int | None, name: str, resume: Path | None = None, epochs: int = 2, **settings: Any
    ) -> tuple[Any, Path]:
        module = Module()
        keep = ModelCheckpoint(tmp_path / name, save_top_k=-1, filename="{epoch}")
        own = trainer(stage, tmp_path, callbacks=[keep], enable_checkpointing=True, max_epochs=epochs, **settings)
        own.fit(module, data(), ckpt_path=str(resume) if resume else None, weights_only=False if resume else None)
        return (module.losses, whole(module)), tmp_path / name / "epoch=0.ckpt"

    def run(rank: int) -> list[Any]:
        unbroken, ddp_file = fit(None, "ddp")
        found = [unbroken]
        _, place = fit(1, "one", epochs=1)
        assert (place / "lightning.ckpt").is_file()
        for stage, name, resume in ((3, "from1", place), (2, "fromddp", ddp_file)):
            found.append(fit(stage, name, resume)[0])
        whole_files = OnecopyStrategy(stage=3, checkpoints="whole")
        _, file = fit(3, "whole", epochs=1, strategy=whole_files)
        assert file.is_file()
        found.append(fit(None, "out", file)[0])
        loaded = Module.load_from_checkpoint(file, weights_only=False)
        assert loaded.hparams["rate"] == 1e-2
        keep = ModelCheckpoint(tmp_path / "top", save_top_k=1, monitor="validated", filename="{step}")
        own = trainer(3, tmp_path, callbacks=[keep], enable_checkpointing=True, max_epochs=3)
        own.fit(Module(), data(), data(2))
        own.validate(ckpt_path="best", dataloaders=data(2), verbose=False, weights_only=False)
        assert own.callback_metrics["validated"].item() == pytest.approx(keep.best_model_score.item(), rel=1e-5)
        return found

    for (losses, weights), *ours in run_ranks(2, run, timeout=120):
        for own_losses, own_weights in ours:
            assert own_losses == pytest.approx(losses[6:], rel=1e-5)
            assert_close(own_weights, weights)
    assert len(list((tmp_path / "top").iterdir())) == 1


class Manual(Module):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y) * self.scale.sum()

    def training_step(self, batch: list[Tensor], number: int) -> None:
        optimizer = self.optimizers()
        loss = self(*batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())


class OnMeta(Module):
    """Makes its net in configure_model, where Lightning has large models made."""

    def __init__(self) -> None:
        super().__init__()
        del self.net, self.scale

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = Stack()
                self.scale = torch.nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.scale)


def test_manual_optimization_strategies_of_ones_own_and_models_on_meta(tmp_path: Path) -> None:
    """Oracle: DDP. A model on meta gets values, which training moves."""

    def run(rank: int) -> list[list[float]]:
        found = []
        for strategy in ("ddp", "onecopy_stage_2", OnecopyStrategy(stage=3, units=[], bucket_bytes=1 << 16)):
            module = Manual()
            trainer(0, tmp_path, strategy=strategy).fit(module, data())
            found.append(module.losses)
        made = OnMeta()
        trainer(3, tmp_path).fit(made, data())
        assert all(torch.isfinite(torch.tensor(made.losses)))
        for wrong, message in (({"checkpoints": "half"}, "slices"), ({"accumulate": 2}, "the Trainer's")):
            with pytest.raises(SettingsError, match=message):
                OnecopyStrategy(**wrong)
        return found

    for expected, *ours in run_ranks(2, run, timeout=120):
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-5)


class Gan(pl.LightningModule):
    """Two parts, called one by one by a manual training step, and by a hook outside of any step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleDict({"makes": torch.nn.Linear(4, 12), "tells": torch.nn.Linear(12, 1)})
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> None:
        softplus = torch.nn.functional.softplus
        makes, tells = self.optimizers()
        real = batch[0]
        self.toggle_optimizer(tells)
        loss = softplus(-self.parts["tells"](real)).mean()
        loss = loss + softplus(self.parts["tells"](self.parts["makes"](real[:, :4]).detach())).mean()
        self.manual_backward(loss)
        self.clip_gradients(tells, 0.5)
        tells.step()
        tells.zero_grad()
        self.untoggle_optimizer(tells)
        self.toggle_optimizer(makes)
        other = softplus(-self.parts["tells"](self.parts["makes"](real[:, :4]))).mean()
        self.manual_backward(other)
        makes.step()
        makes.zero_grad()
        self.untoggle_optimizer(makes)
        self.seen += [loss.item(), other.item()]

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.seen.append(self.parts["makes"](torch.ones(1, 4)).sum().item())

    def configure_optimizers(self) -> Any:
        return tuple(torch.optim.SGD(self.parts[name].parameters(), lr=0.1) for name in ("makes", "tells"))


def test_parts_are_called_by_manual_steps_and_hooks(tmp_path: Path) -> None:
    """Oracle: DDP."""
    rows = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))

    def run(rank: int) -> list[list[float]]:
        found = []
        for strategy in ("ddp_find_unused_parameters_true", "onecopy_stage_1", "onecopy_stage_3"):
            module = Gan()
            loader = DataLoader(TensorDataset(rows), batch_size=2)
            trainer(0, tmp_path, strategy=strategy).fit(module, loader)
            found.append(module.seen)
        return found

    for expected, *ours in run_ranks(2, run, timeout=120):
        assert len(expected) > 4
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-5)


def test_settings_are_onecopys_or_lightnings() -> None:
    """DDP's own, which decide how it works, are taken; what nobody knows is named with the nearest."""
    OnecopyStrategy(stage=3, find_unused_parameters=True, copies=1)
    with pytest.raises(SettingsError, match="no setting 'precison'; did you mean 'precision'"):
        OnecopyStrategy(stage=3, precison="bf16")
    with pytest.raises(SettingsError, match="no setting 'ddp_comm_hook'"):
        OnecopyStrategy(stage=3, ddp_comm_hook=None)


def _packages() -> Iterator[str]:
    yield "lightning"
    if find_spec("pytorch_lightning") is not None:
        yield "pytorch_lightning"


@pytest.mark.parametrize("package", list(_packages()))
def test_the_names_are_registered_in_each_package(package: str) -> None:
    strategy = strategy_of(package)
    module = __import__(f"{package}.strategies" if package == "pytorch_lightning" else f"{package}.pytorch.strategies")
    strategies = (module if package == "pytorch_lightning" else module.pytorch).strategies
    assert issubclass(strategy, strategies.DDPStrategy)
    assert {f"onecopy_stage_{stage}" for stage in range(4)} <= set(strategies.StrategyRegistry.available_strategies())
