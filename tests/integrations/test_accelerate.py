"""Accelerate's Accelerator over sharded models. Oracle: the same program with Accelerate's own, under plain DDP."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="needs the extra 'integrations': accelerate is not installed")

import accelerate
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.errors import CheckpointError, SettingsError
from onecopy.integrations.accelerate import Accelerator
from ranks import run_ranks

STAGES = (None, 0, 1, 2, 3)
"""None is DDP."""


def make(stage: int | None, **settings: Any) -> Any:
    if stage is None:
        return accelerate.Accelerator(cpu=True, **settings)
    return Accelerator(cpu=True, shard={"stage": stage}, **settings)


def data(steps: int = 6) -> DataLoader[Any]:
    batches = vector_batches(steps, rows=4)
    return DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True))), batch_size=2)


def prepared(accelerator: Any) -> tuple[Any, ...]:
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return accelerator.prepare(model, optimizer, data(), scheduler)  # type: ignore[no-any-return]


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    """The loop of Accelerate's documentation."""
    found = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(accelerator.gather(loss.detach()).mean().item())
    return found


@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, {"mixed_precision": "bf16"}],
    ids=["accumulation", "a shorter last step", "bf16"],
)
def test_losses_and_norms_are_ddps_at_every_stage(settings: dict[str, Any]) -> None:
    def run(rank: int) -> list[list[float]]:
        found = []
        for stage in STAGES:
            accelerate.state.AcceleratorState._reset_state()
            accelerate.state.GradientState._reset_state()
            accelerator = make(stage, **settings)
            found.append(train(accelerator, *prepared(accelerator)))
        return found

    for expected, *ours in run_ranks(2, run):
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-2 if "mixed_precision" in settings else 1e-5)


def test_fp16_skips_steps_that_overflow() -> None:
    """Accelerate leaves fp16 away on a CPU, so it is told afterwards what it tells itself on a GPU. Oracle: DDP."""

    def run(rank: int) -> list[tuple[list[float], float]]:
        found = []
        for stage in STAGES:
            accelerate.state.AcceleratorState._reset_state()
            accelerate.state.GradientState._reset_state()
            accelerator = make(stage, mixed_precision="fp16")
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
            log = train(accelerator, *prepared(accelerator))
            found.append(
                ([-1.0 if not math.isfinite(value) else value for value in log], accelerator.scaler.get_scale())
            )
        return found

    for (expected, scale), *ours in run_ranks(2, run):
        assert -1.0 in expected
        assert max(expected) > 0, "a step is skipped, and others are taken"
        for found, own_scale in ours:
            assert found == pytest.approx(expected, rel=1e-2)
            assert own_scale == scale < 2.0**18


def test_states_go_on_and_models_are_written(tmp_path: Path) -> None:
    """Oracle: the run under DDP that never stopped; its weights. One stage saves, the next one loads."""

    def run(rank: int) -> tuple[Any, list[Any]]:
        ddp = make(None)
        parts = prepared(ddp)
        train(ddp, *parts)
        expected = train(ddp, *parts), ddp.get_state_dict(parts[0])
        found = []
        for stage, after in ((0, 1), (1, 2), (2, 3), (3, 0)):
            project = ProjectConfiguration(project_dir=str(tmp_path / str(stage)), automatic_checkpoint_naming=True)
            first = make(stage, project_config=project)
            parts = prepared(first)
            counter = Counter()
            first.register_for_checkpointing(counter)
            train(first, *parts)
            counter.value = 7
            saved = first.save_state()
            assert Path(saved).name == "checkpoint_0"
            train(first, *parts)

            second = make(after)
            parts = prepared(second)
            counter = Counter()
            second.register_for_checkpointing(counter)
            second.load_state(saved)
            assert counter.value == 7
            log = train(second, *parts)
            second.save_model(parts[0], tmp_path / f"weights{stage}", max_shard_size="1KB")
            index = json.loads((tmp_path / f"weights{stage}" / "model.safetensors.index.json").read_text())
            files = {*index["weight_map"].values()}
            written = {n: t for file in files for n, t in load_file(tmp_path / f"weights{stage}" / file).items()}
            state = second.get_state_dict(parts[0])
            assert bool(state) == (rank == 0)
            found.append((log, written, state))
            dist.barrier()
        return expected, found

    (log, weights), found = run_ranks(2, run)[0]
    for own_log, written, state in found:
        assert own_log == pytest.approx(log, rel=1e-5)
        for own in (written, state):
            assert own.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-6)


class Counter:
    """Something of the user's own that is saved with the rest."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_several_models_with_their_optimizers(tmp_path: Path) -> None:
    """Two models that train side by side, saved and loaded together. Oracle: DDP."""

    def steps(accelerator: Any, *pairs: tuple[Any, Any]) -> list[float]:
        log = []
        for x, y in vector_batches(2, rows=4):
            for model, optimizer in pairs:
                loss = model(x[dist.get_rank() :: 2], y[dist.get_rank() :: 2])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                log.append(loss.item())
        return log

    def run(rank: int) -> list[Any]:
        found = []
        for stage in (None, 1, 3):
            accelerator = make(stage)
            one, two = seeded(Stack), seeded(Stack)
            first = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
            second = torch.optim.AdamW(two.parameters(), lr=1e-2)
            one, two, first, second = accelerator.prepare(one, two, first, second)
            if stage is not None:
                assert all(isinstance(p, onecopy.SlicedTensor) for m in (one, two) for p in m.parameters())
            pairs = (one, first), (two, second)
            steps(accelerator, *pairs)
            accelerator.save_state(str(tmp_path / str(stage)))
            log = steps(accelerator, *pairs)
            accelerator.load_state(str(tmp_path / str(stage)))
            assert steps(accelerator, *pairs) == pytest.approx(log, rel=1e-5)
            found.append(log)
        return found

    for expected, *ours in run_ranks(2, run):
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-5)


def test_states_of_ddp_are_loaded_and_hooks_see_sharded_models(tmp_path: Path) -> None:
    """Oracle: the run under DDP that goes on from its own state."""

    def run(rank: int) -> tuple[list[float], list[float]]:
        ddp = make(None)
        model, optimizer, loader, scheduler = prepared(ddp)
        train(ddp, model, optimizer, loader, scheduler)
        ddp.save_state(str(tmp_path / "ddp"))
        expected = train(ddp, model, optimizer, loader, scheduler)
        ddp.wait_for_everyone()
        accelerate.state.AcceleratorState._reset_state()
        accelerate.state.GradientState._reset_state()
        accelerator = make(3)
        seen: list[tuple[int, int]] = []
        accelerator.register_save_state_pre_hook(
            lambda models, weights, place: seen.append((len(models), len(weights)))
        )
        accelerator.register_load_state_pre_hook(lambda models, place: seen.append((len(models), 0)))
        ours = prepared(accelerator)
        accelerator.load_state(str(tmp_path / "ddp"))
        found = train(accelerator, *ours)
        accelerator.save_state(str(tmp_path / "sharded"))
        assert seen == [(1, 0), (1, 1)]
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="directory that save_state wrote"):
            accelerator.load_state(str(tmp_path / "empty"))
        return expected, found

    for expected, found in run_ranks(2, run):
        assert found == pytest.approx(expected, rel=1e-4)


def test_an_optimizer_is_prepared_before_its_model() -> None:
    """Oracle: both prepared together."""

    def run(rank: int) -> list[list[float]]:
        found = []
        for together in (True, False):
            accelerator = make(3)
            model = seeded(Stack)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            if together:
                model, optimizer = accelerator.prepare(model, optimizer)
            else:
                optimizer = accelerator.prepare(optimizer)
                model = accelerator.prepare(model)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, 1.0)
            found.append(train(accelerator, model, optimizer, accelerator.prepare(data()), scheduler))
            accelerate.state.AcceleratorState._reset_state()
            accelerate.state.GradientState._reset_state()
        return found

    for expected, found in run_ranks(2, run):
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_shard_does_not_take_is_named() -> None:
    for shard, message in (
        ({"stagee": 3}, "did you mean 'stage'"),
        ({"precision": "bf16"}, "must hold a stage"),
        (3, "arguments of onecopy.shard"),
        ({"stage": 3, "optimizer": None}, "prepare"),
    ):
        with pytest.raises(SettingsError, match=message):
            Accelerator(cpu=True, shard=shard)


YAML = """
mixed_precision: 'no'
gradient_accumulation_steps: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
"""


def test_the_fsdp_plugins_yaml_and_what_cannot_be(tmp_path: Path) -> None:
    """Oracle: the loop under DDP with as many micro-batches as the file says."""
    (tmp_path / "fsdp.yaml").write_text(YAML)

    def run(rank: int) -> tuple[list[float], list[float]]:
        ddp = make(None, gradient_accumulation_steps=2)
        expected = train(ddp, *prepared(ddp))
        settings = onecopy.from_accelerate(tmp_path / "fsdp.yaml")
        accelerator = Accelerator(cpu=True, shard=settings.arguments)
        assert accelerator.gradient_accumulation_steps == 2
        found = train(accelerator, *prepared(accelerator))
        with pytest.raises(SettingsError, match="leave one of them out"):
            Accelerator(cpu=True, shard=settings.arguments, gradient_accumulation_steps=3)
        model = seeded(Stack)
        optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model.blocks]
        with pytest.raises(SettingsError, match="a group for each"):
            accelerator.prepare(model, *optimizers)
        return expected, found

    for expected, found in run_ranks(2, run):
        assert found == pytest.approx(expected, rel=1e-5)
