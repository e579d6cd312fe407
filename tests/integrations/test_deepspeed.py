"""Programs written for DeepSpeed with their import changed.

Oracles: plain DDP in a loop that does what DeepSpeed's documentation says; its formulas of schedules and loss scales;
and, where the package is installed, the same program with DeepSpeed itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from models import TinyGPT, seeded, token_batches
from onecopy.compat import deepspeed
from onecopy.compat.deepspeed.config import LossScale, read_config
from onecopy.compat.deepspeed.scaling import Scaler
from onecopy.compat.deepspeed.schedules import make_optimizer, make_schedule
from onecopy.errors import CheckpointError, SettingsError, UsageError
from onecopy.integrations.deepspeed import KEYS
from ranks import run_ranks

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "total_num_steps": 6},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
}


def with_stage(stage: int, **more: Any) -> dict[str, Any]:
    return {**BASE, "zero_optimization": {**BASE["zero_optimization"], "stage": stage}, **more}


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch[dist.get_rank() :: dist.get_world_size()]


def train(engine: Any, steps: int = 4, first: int = 0) -> list[float]:
    """The loop of DeepSpeed's documentation: losses, then norm and learning rate of each step."""
    found = []
    for (batch,) in token_batches(steps, rows=12)[first:]:
        for part in mine(batch).chunk(engine.gradient_accumulation_steps()):
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        found += [float(engine.get_global_grad_norm()), engine.get_lr()[0]]
    return found


def ddp_loop(steps: int = 4) -> list[float]:
    """The same under DDP: losses over the micro-batches, norm before clipping, the schedule after the step."""
    model = DistributedDataParallel(seeded(TinyGPT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step, (batch,) in enumerate(token_batches(steps, rows=12)):
        for number, part in enumerate(mine(batch).chunk(3)):
            model.require_backward_grad_sync = number == 2
            loss = model(part)
            (loss / 3).backward()
            found.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        # Of two steps of warming up by logarithms, then down to 0 at step 6.
        rate = 1e-2 * (math.log(step + 1) / math.log(2) if step < 2 else (6 - step) / 4)
        optimizer.param_groups[0]["lr"] = rate
        found += [norm.item(), rate]
    return found


def test_losses_norms_and_rates_are_ddps_at_every_stage(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 5}
    offloads = {2: {"offload_optimizer": {"device": "cpu", "pin_memory": True}}, 3: {"offload_param": nvme}}

    def run(rank: int) -> list[list[float]]:
        found = [ddp_loop()]
        for stage, offload in [*((stage, {}) for stage in range(4)), *offloads.items()]:
            config = with_stage(stage, steps_per_print=2)
            config["zero_optimization"] = {**config["zero_optimization"], **offload}
            engine, optimizer, loader, scheduler = deepspeed.initialize(model=seeded(TinyGPT), config=config)
            if offload and stage == 3:
                assert sum(onecopy.meter(engine.module).off_device.values()) > 0
            assert (optimizer, scheduler, loader) == (engine.optimizer, engine.lr_scheduler, None)
            assert engine.train_batch_size() == 12
            found.append(train(engine))
            assert (engine.global_steps, engine.micro_steps, engine.zero_optimization_stage()) == (4, 12, stage)
            sent = onecopy.ledger(engine.module).last_step.state_bytes // (2 * onecopy.padded_numel(engine.module))
            # Bytes of fp32 elements, times (N-1)/N = 1/2: 2Ψ, 2Ψ, (g + 1)Ψ and 3gΨ with three micro-batches.
            assert sent == (2, 2, 4, 9)[stage]
        return found

    for expected, *ours in run_ranks(2, run):
        for found in ours:
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.parametrize(
    "more",
    [{}, {"gradient_clipping": None}, {"bf16": {"enabled": True}}],
    ids=["as given", "its default clipping", "bf16"],
)
def test_the_program_gives_what_deepspeed_gives(more: dict[str, Any]) -> None:
    def run(rank: int) -> tuple[list[float], list[float]]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        theirs = importlib.import_module("deepspeed")
        config = {key: value for key, value in with_stage(2, **more).items() if value is not None}
        return (
            train(theirs.initialize(model=seeded(TinyGPT), config=dict(config))[0]),
            train(deepspeed.initialize(model=seeded(TinyGPT), config=config)[0]),
        )

    for expected, found in run_ranks(2, run, timeout=200):
        assert found == pytest.approx(expected, rel=2e-2 if "bf16" in more else 1e-5)


def test_optimizers_schedules_groups_and_data_of_ones_own() -> None:
    """Oracle: the loop under DDP, with the same optimizer made by hand."""

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((6,), float(index))

    config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}

    def ours(kind: str) -> list[float]:
        model = seeded(nn.Linear, 6, 1)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
        if kind == "made":
            optimizer: Any = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
            schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            parameters = None
        else:
            optimizer = lambda held: torch.optim.SGD(held, lr=0.3, momentum=0.9)  # noqa: E731
            schedule = lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)  # noqa: E731
            parameters = groups
        engine, made, loader, _ = deepspeed.initialize(
            SimpleNamespace(deepspeed_config=config),
            model,
            optimizer,
            parameters,
            training_data=Numbers(),
            lr_scheduler=schedule,
        )
        losses = []
        for batch in loader:
            assert batch.shape == (2, 6)
            losses.append(engine(batch).mean())
            engine.backward(losses[-1])
            engine.step()
        assert [group["lr"] for group in made.param_groups] == [0.1 / 4, 0.2 / 4]
        return [loss.item() for loss in losses]

    def by_hand() -> list[float]:
        model = DistributedDataParallel(seeded(nn.Linear, 6, 1))
        groups = [{"params": [model.module.weight], "lr": 0.1}, {"params": [model.module.bias], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses = []
        sampler = torch.utils.data.DistributedSampler(Numbers())
        for batch in torch.utils.data.DataLoader(Numbers(), batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            losses.append(model(batch).mean())
            losses[-1].backward()
            optimizer.step()
            schedule.step()
        return [loss.item() for loss in losses]

    def run(rank: int) -> tuple[list[float], ...]:
        return by_hand(), ours("made"), ours("function")

    for expected, *found in run_ranks(2, run):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5)


def test_fp16_skips_steps_that_overflow_and_goes_on_from_its_scale() -> None:
    """A scale of 2^30 overflows fp16 until it has halved often enough. Oracle: a loop in fp32 without those steps."""
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 100}
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "fp16": fp16,
        "zero_optimization": {"stage": 2},
    }

    def run(rank: int) -> tuple[int, float, list[float], list[float]]:
        engine, *_ = deepspeed.initialize(model=seeded(TinyGPT), config=config)
        plain = seeded(TinyGPT)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        found, expected = [], []
        (batch,) = token_batches(1, rows=12)[0]
        for _ in range(30):
            skipped = engine.skipped_steps
            loss = engine(mine(batch))
            engine.backward(loss)
            engine.step()
            if engine.skipped_steps == skipped:
                found.append(float(engine.get_global_grad_norm()))
                optimizer.zero_grad()
                plain(batch).backward()
                expected.append(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item())
                optimizer.step()
        return engine.skipped_steps, engine.loss_scale(), found, expected

    for skipped, scale, found, expected in run_ranks(2, run):
        assert 5 < skipped < 29
        assert scale == 2.0 ** (30 - skipped)
        assert found == pytest.approx(expected, rel=2e-2)


def test_the_scale_follows_overflows_as_documented() -> None:
    """Halves after ``hysteresis`` overflows, doubles after a window without one, never below the least."""
    scaler = Scaler(LossScale(power=4, window=3, hysteresis=2, least=4.0))
    scales = []
    for overflow in (True, True, False, False, False, False, True, True, True, True):
        scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    assert scales == [16, 8, 8, 8, 16, 16, 16, 8, 4, 4]
    fixed = Scaler(LossScale(static=128.0))
    fixed.update(overflow=True)
    assert fixed.scale == 128


def test_checkpoints_go_on_at_another_stage(tmp_path: Path) -> None:
    """Oracle: the engine that never stopped."""

    def run(rank: int) -> tuple[list[float], list[float]]:
        engine, *_ = deepspeed.initialize(model=seeded(TinyGPT), config=with_stage(1))
        nothing, *_ = deepspeed.initialize(model=seeded(TinyGPT), config=with_stage(3))
        assert nothing.load_checkpoint(tmp_path / "empty") == (None, None)
        log = train(engine, 2)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        engine.save_checkpoint(tmp_path, tag="again", save_latest=False)
        log = train(engine, 4, first=2)
        other, *_ = deepspeed.initialize(model=TinyGPT(), config=with_stage(3))
        path, client = other.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step2")
        assert client == {"epoch": 3}
        assert (other.global_steps, other.micro_steps) == (2, 6)
        resumed = train(other, 4, first=2)
        weights, *_ = deepspeed.initialize(model=TinyGPT(), config=with_stage(2))
        weights.load_checkpoint(tmp_path, tag="again", load_module_only=True)
        assert weights.global_steps == 0
        with pytest.raises(CheckpointError, match="no checkpoint 'nope'"):
            other.load_checkpoint(tmp_path, tag="nope")
        with pytest.raises(SettingsError, match="plain name"):
            other.save_checkpoint(tmp_path, tag="../nope")
        (tmp_path / "theirs").mkdir(exist_ok=True)
        (tmp_path / "theirs" / "mp_rank_00_model_states.pt").touch()
        with pytest.raises(CheckpointError, match="import-deepspeed"):
            other.load_checkpoint(tmp_path, tag="theirs")
        return log, resumed

    for expected, found in run_ranks(2, run):
        assert found == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "latest").read_text() == "global_step2"


def test_sixteen_bit_weights_and_gathered_parameters(tmp_path: Path) -> None:
    """Oracle: the model as it was built, in bf16."""

    def run(rank: int) -> None:
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        with deepspeed.zero.Init():
            model = seeded(TinyGPT)
        engine, *_ = deepspeed.initialize(
            model=model, config=with_stage(3, zero_optimization=zero, bf16={"enabled": True})
        )
        assert engine.bfloat16_enabled()
        assert engine.logits.__self__ is engine.module
        with pytest.raises(AttributeError, match="neither this engine nor its model, a TinyGPT, has 'eigenvalue'"):
            _ = engine.eigenvalue
        with pytest.raises(UsageError, match="takes the loss"):
            engine.backward(1.0)
        assert (engine.optimizer_name(), engine.zero_optimization(), engine.was_step_applied()) == (
            "AdamW",
            True,
            False,
        )
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]
        assert engine.save_16bit_model(tmp_path)
        refused, *_ = deepspeed.initialize(model=seeded(TinyGPT), config=with_stage(3))
        assert not refused.save_16bit_model(tmp_path / "none")
        head = engine.module.norm
        with deepspeed.zero.GatheredParameters([head.weight], modifier_rank=1), torch.no_grad():
            if rank == 1:
                head.weight.fill_(2.0)
        with deepspeed.zero.GatheredParameters(engine.module):
            assert torch.equal(head.weight, torch.full((12,), 2.0))
        with deepspeed.zero.GatheredParameters(nn.Linear(2, 2).weight):
            pass

    run_ranks(2, run)
    found = torch.load(tmp_path / "pytorch_model.bin")
    expected = {name: value.bfloat16() for name, value in seeded(TinyGPT).state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_schedules_are_those_of_the_documentation(kind: str) -> None:
    def rates(name: str, **params: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        schedule = make_schedule({"type": name, "params": {"warmup_type": kind, **params}}, optimizer)
        found = [optimizer.param_groups[0]["lr"]]
        for _ in range(8):
            schedule.step()
            found.append(schedule.get_last_lr()[0])
        return found

    ramp = [math.log(i + 1) / math.log(4) if kind == "log" else i / 4 for i in range(4)]
    assert rates("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.3, warmup_num_steps=4) == pytest.approx(
        [0.1, *(0.1 + 0.2 * share for share in ramp), 0.3, 0.3, 0.3, 0.3]
    )
    assert rates("WarmupDecayLR", warmup_max_lr=0.4, warmup_num_steps=4, total_num_steps=7) == pytest.approx(
        [0.0, *(0.4 * share for share in ramp), 0.4, 0.4 * 2 / 3, 0.4 / 3, 0.0]
    )
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * place / 3)) / 2 for place in (1, 2, 3, 3)]
    assert rates("WarmupCosineLR", warmup_num_steps=4, total_num_steps=7, cos_min_ratio=0.1) == pytest.approx(
        [0.0, *(0.5 * share for share in ramp), *(0.5 * share for share in cosine)]
    )


def test_optimizers_have_deepspeeds_defaults() -> None:
    """FusedAdam's: no weight decay, decoupled unless adam_w_mode is off."""
    held = [nn.Parameter(torch.ones(2))]
    for section, kind, decay in (
        ({"type": "Adam", "params": {"lr": 1e-4}}, torch.optim.AdamW, 0.0),
        ({"type": "adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW, 0.01),
        ({"type": "Adagrad", "params": {}}, torch.optim.Adagrad, 0),
    ):
        made = make_optimizer(section, held)
        assert type(made) is kind
        assert made.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
        ({"zero_optimization": {"stagee": 1}}, "did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "gpu"}}}, "must be none, cpu or nvme"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path is missing"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "second copy"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantised"),
        ({"flops_profiler": {"enabled": True}}, "a tool of DeepSpeed's own"),
        ({"wall_clock_breakdown": True}, "a tool of DeepSpeed's own"),
        ({"optimizer": {"type": "AdamV", "params": {}}}, "did you mean 'adam'"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "no argument of AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "only Hugging Face's Trainer"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "none that onecopy makes"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "set gradient_clipping instead"),
        ({"scheduler": {"type": "WarmupRL", "params": {}}}, "did you mean 'WarmupLR'"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "initialize\\(lr_scheduler=\\)"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "did you mean 'warmup_num_steps'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "must not both"),
        ({"train_batch_size": 10}, "train_batch_size .10. must be"),
        ({"gradient_accumulation_steps": "auto"}, "only Hugging Face's Trainer"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "must be one of"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_with_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        deepspeed.initialize(model=nn.Linear(2, 2), config={**BASE, **change}, dist_init_required=False)


def test_every_known_key_is_done_makes_no_difference_or_is_refused() -> None:
    """No key is taken and forgotten: with a value that asks for something, it changes what is read, or is refused."""
    from onecopy.compat.deepspeed.config import _DONE, _NO_DIFFERENCE

    plain = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    before = read_config(plain, None, 2)
    asks = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3, "zero_optimization.stage": 1, "zero_optimization.mics_shard_size": 2,
        "zero_optimization.zero_hpz_partition_size": 8,
        "zero_optimization.offload_optimizer": {"device": "cpu"}, "zero_optimization.offload_param": {"device": "cpu"},
        "communication_data_type": "bf16", "data_types.grad_accum_dtype": "bf16", "steps_per_print": 5,
        "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, "fp16.auto_cast": True,
        "zero_optimization.stage3_prefetch_bucket_size": 0,
    }  # fmt: skip
    for key in KEYS:
        section, _, name = key.rpartition(".")
        value = asks.get(key, {"device": "cpu"} if "offload" in key else 7 if key.startswith("fp16") else True)
        changed: dict[str, Any] = json.loads(json.dumps(plain))
        if section.startswith("fp16"):
            changed["fp16"] = {"enabled": True}
        before = read_config(changed, None, 2)
        (changed.setdefault(section, {}) if section else changed)[name] = value
        try:
            after = read_config(changed, None, 2)
        except SettingsError:
            continue
        always = {"fp16.enabled", "fp16.auto_cast", "zero_optimization.load_from_fp32_weights"}
        assert after != before or key in _NO_DIFFERENCE | always, key
        assert not (key in _NO_DIFFERENCE and key.startswith(_DONE))


def test_the_launchers_arguments_and_what_initialize_needs() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"]).deepspeed_config == "x.json"
    with pytest.raises(SettingsError, match="needs a config"):
        deepspeed.initialize(model=nn.Linear(2, 2))
    with pytest.raises(SettingsError, match="parallelize_module"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=BASE, mpu=object())
    with pytest.raises(SettingsError, match="nvme"):
        deepspeed.zero.Init(remote_device="nvme")

    def run(rank: int) -> None:
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(UsageError, match="no optimizer"):
            engine.step()

    run_ranks(1, run)
