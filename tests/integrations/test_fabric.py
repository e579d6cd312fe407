"""Lightning Fabric over sharded models. Oracle: the same loop under Fabric's own DDP, in the same fork."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra 'integrations': lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.errors import SettingsError
from onecopy.integrations.lightning import OnecopyFabricStrategy
from ranks import run_ranks

STAGES = (None, 0, 1, 2, 3)
"""None is DDP."""


class Net(Stack):
    """With a method that is called in place of forward."""

    def twice(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self(x, y)


def make(stage: int | None, **settings: Any) -> Fabric:
    # As torchrun says who is who.
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    strategy = settings.pop("strategy", "ddp" if stage is None else f"onecopy_stage_{stage}")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def data(fabric: Fabric, steps: int = 6) -> Any:
    batches = vector_batches(steps, rows=4)
    whole = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    return fabric.setup_dataloaders(DataLoader(whole, batch_size=2))


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = seeded(Net)
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))  # type: ignore[no-any-return]


def train(fabric: Fabric, model: Any, optimizer: Any, every: int = 1, method: str | None = None) -> list[float]:
    """The loop of Fabric's documentation."""
    if method is not None:
        model.mark_forward_method(method)
    found = []
    for number, batch in enumerate(data(fabric), 1):
        with fabric.no_backward_sync(model, enabled=number % every != 0):
            loss = (model if method is None else getattr(model, method))(*batch)
            fabric.backward(loss)
        if number % every == 0:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            # Of fp16 that overflows, whichever it is.
            found.append(-1.0 if norm is None or not norm.isfinite() else norm.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(fabric.all_reduce(loss.detach()).item())
    return found


@pytest.mark.parametrize(
    "settings, loop",
    [({}, {"every": 2}), ({}, {"method": "twice"}), ({"precision": "bf16-mixed"}, {}), ({"fp16": True}, {})],
    ids=["accumulation", "a method in place of forward", "bf16-mixed", "fp16 with its loss scale"],
)
def test_losses_and_norms_are_ddps_at_every_stage(settings: dict[str, Any], loop: dict[str, Any]) -> None:
    def run(rank: int) -> list[list[float]]:
        found = []
        for stage in STAGES:
            own = dict(settings)
            if own.pop("fp16", False):
                own["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18))
            fabric = make(stage, **own)
            found.append(train(fabric, *set_up(fabric), **loop))
        return found

    for expected, *ours in run_ranks(2, run):
        assert (-1.0 in expected) == ("fp16" in settings), "a step is skipped, and others are taken"
        assert max(expected[::2]) > 0
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-2 if settings else 1e-5)


def test_checkpoints_go_on(tmp_path: Path) -> None:
    """Directories at another stage, whole files in DDP, and DDP's files in slices. Oracle: DDP that never stopped."""

    def begin(fabric: Fabric) -> dict[str, Any]:
        model, optimizer = set_up(fabric)
        return {"model": model, "optimizer": optimizer, "step": 0, "plain": torch.nn.Linear(2, 2)}

    def go_on(fabric: Fabric, path: Path) -> tuple[list[float], int, dict[str, Any]]:
        state = begin(fabric)
        torch.nn.init.zeros_(state["plain"].weight)
        left = fabric.load(path, state)
        assert state["plain"].weight.any()
        return train(fabric, state["model"], state["optimizer"]), state["step"], left

    def run(rank: int) -> list[Any]:
        ddp = make(None)
        state = begin(ddp)
        train(ddp, state["model"], state["optimizer"])
        ddp.save(tmp_path / "ddp", state | {"step": 6, "more": "unasked"})
        found: list[Any] = [train(ddp, state["model"], state["optimizer"])]
        for stage, after in ((1, 3), (3, 2)):
            fabric = make(stage)
            state = begin(fabric)
            train(fabric, state["model"], state["optimizer"])
            fabric.save(tmp_path / str(stage), state | {"step": 6, "more": "unasked"})
            assert sorted(p.name for p in (tmp_path / str(stage)).iterdir()) == ["fabric.ckpt", "state_0"]
            found.append(go_on(make(after), tmp_path / str(stage)))
            with pytest.raises(SettingsError, match="put that into state"):
                fabric.save(tmp_path / "alone", {"optimizer": state["optimizer"]})
            with pytest.raises(SettingsError, match='checkpoints="whole"'):
                fabric.save(tmp_path / "some", state, filter={"model": lambda name, value: True})
        found.append(go_on(make(3), tmp_path / "ddp"))
        whole = make(3, strategy=OnecopyFabricStrategy(stage=3, checkpoints="whole"))
        state = begin(whole)
        train(whole, state["model"], state["optimizer"])
        whole.save(tmp_path / "whole", state | {"step": 6, "more": "unasked"})
        found.append(go_on(make(None), tmp_path / "whole"))
        return found

    for expected, *ours in run_ranks(2, run, timeout=120):
        for log, step, left in ours:
            assert log == pytest.approx(expected, rel=1e-5)
            assert step == 6
            assert left == {"more": "unasked"}


def test_models_on_meta_optimizers_made_afterwards_and_offload(tmp_path: Path) -> None:
    """`setup_module` first. Oracle: DDP with the same weights."""

    def run(rank: int) -> list[list[float]]:
        found = []
        offload = onecopy.Offload(tmp_path, tmp_path)
        for strategy in ("ddp", "onecopy_stage_2", OnecopyFabricStrategy(stage=3, units=[], offload=offload)):
            fabric = make(0, strategy=strategy)
            with fabric.init_module(empty_init=strategy != "ddp"):
                model = Net()
            called = fabric.setup_module(model)
            called.load_state_dict(seeded(Net).state_dict())
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(called.parameters(), lr=1e-2))
            found.append(train(fabric, called, optimizer))
            if strategy != "ddp":
                assert isinstance(next(iter(model.parameters())), onecopy.SlicedTensor)
        fabric = make(3)
        two = seeded(Net)
        with pytest.raises(SettingsError, match=r"call fabric.setup_module\(model\) first"):
            fabric.setup(two, *(torch.optim.SGD(two.parameters(), lr=0.1) for _ in range(2)))
        with torch.device("meta"):
            empty = Net()
        with pytest.raises(SettingsError, match="the model is on meta"):
            fabric.setup(empty, torch.optim.SGD(empty.parameters(), lr=0.1))
        for wrong, message in (({"checkpoints": "half"}, "slices"), ({"accumulate": 2}, "the module's")):
            with pytest.raises(SettingsError, match=message):
                OnecopyFabricStrategy(**wrong)
        return found

    for expected, *ours in run_ranks(2, run):
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-5)
