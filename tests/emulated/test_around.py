"""What stands around training, on the device: the job of `onecopy train`, averages, exports, state dicts of DCP.

Oracles: the same job on the CPU, and plain PyTorch in one process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import onecopy
from jobs import SMALL, run_job
from models import filled, token_batches
from onecopy.recipes.settings import load
from onecopy.recipes.train import train as train_job
from onecopy.recipes.world import World
from oracle import OPTIMIZERS, assert_same_weights, train, whole_weights
from training import on, parts_of, run_clean, tiny, weights_of

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("stage", [1, 3])
def test_the_training_job_has_the_losses_that_it_has_on_the_cpu(stage: int, tmp_path: Path) -> None:
    settings = {
        "parallel.ranks": 2,
        "parallel.stage": stage,
        "parallel.precision": "fp32",
        "schedule.steps": 8,
        "checkpoint.save_every": 4,
        "activations.recompute": True,
        "activations.keep_on": "cpu",
        "parallel.defragment": True,
    }
    expected, _ = run_job(tmp_path / "cpu", 2, settings)
    where = {"run.directory": str(tmp_path / "device"), "parallel.device": "emu"}
    config = load(None, {**SMALL, **settings, **where})

    def run(rank: int, device: torch.device) -> bool:
        return train_job(config, World(rank, rank, 2, device))

    assert [seen.result for seen in run_clean(2, run)] == [True, True]
    found = [json.loads(line) for line in (tmp_path / "device" / "metrics.jsonl").read_text().splitlines()]
    assert [r.get("loss") for r in found] == pytest.approx([r.get("loss") for r in expected], rel=1e-5)
    assert len(found) >= 3


def test_moving_averages_equal_one_process() -> None:
    def run(rank: int, device: torch.device) -> None:
        batches = token_batches(3)
        twin = tiny()
        averages = {name: value.clone() for name, value in whole_weights(twin).items()}
        optimizer = OPTIMIZERS["sgd"](twin.parameters())
        for batch in batches:
            train(twin, optimizer, [batch])
            for name, value in whole_weights(twin).items():
                averages[name].lerp_(value, 0.5)
        model = onecopy.shard(on(device, tiny), 3)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        averaged = onecopy.ema(model, decay=0.5)
        for batch in parts_of(batches, rank, 2, device):
            train(model, optimizer, [batch])
            averaged.update()
        with averaged.applied():
            assert_same_weights(weights_of(model), averages, 1e-6)

    run_clean(2, run)


def test_exported_weights_are_those_of_the_device(tmp_path: Path) -> None:
    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, lambda: filled(2.5)), 3)
        onecopy.save(tmp_path / "run", model)
        onecopy.export(tmp_path / "run", tmp_path / "out")

    run_clean(2, run)
    files = list((tmp_path / "out").glob("*.safetensors"))
    weights = {name: value for file in files for name, value in load_file(file).items()}
    assert len(weights) == 4
    assert all((value == 2.5).all() for value in weights.values())


def test_whole_state_dicts_of_torch_go_out_and_in() -> None:
    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, lambda: filled(1.5)), 3)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            assert all(value.is_cpu and (value == 1.5).all() for value in whole.values())
        other = onecopy.shard(on(device, lambda: filled(0.0)), 3)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, whole if rank == 0 else {}, options=options)
        assert all((value == 1.5).all() for value in weights_of(other).values())

    run_clean(2, run)


def test_parameters_answer_about_all_their_elements() -> None:
    """Reductions are collectives over slices. Oracle: the values that were put in."""

    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, lambda: filled(2.0)), 3)
        for parameter in model.parameters():
            assert parameter.sum().item() == 2.0 * parameter.numel()
            assert parameter.mean().item() == 2.0
            assert parameter.std().item() == 0.0
            assert parameter.max().item() == parameter.min().item() == 2.0
            assert torch.equal(parameter.detach(), parameter.detach().clone())
            assert parameter.norm().item() == pytest.approx(2.0 * parameter.numel() ** 0.5)
        penalty = sum(p.square().sum() for p in model.parameters())
        (model(torch.ones(1, 40, device=device)).sum() * 0 + penalty).backward()
        for parameter in model.parameters():
            with onecopy.gathered(parameter.grad) as gradient:
                assert (gradient == 4.0).all()

    run_clean(2, run)
