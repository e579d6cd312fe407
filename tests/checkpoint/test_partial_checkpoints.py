"""Saves in the middle of a step, of trainable parameters alone, and exports from inside a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import CheckpointError, SettingsError, UsageError
from oracle import OPTIMIZERS, assert_same_weights, gathered_weights, part, train_twin, whole_weights
from ranks import every_stage


@every_stage
@one_fork
def test_a_save_between_micro_batches_holds_the_last_step_and_disturbs_nothing(
    stage: int, num_ranks: int, tmp_path: Path
) -> Forked:
    """Oracles: the weights and states after the last step, and the whole-batch twin that saves nowhere."""
    batches = vector_batches(8)

    def run(rank: int) -> None:
        expected = train_twin(seeded(Stack), OPTIMIZERS["adamw"], batches, accumulate=4)
        model = onecopy.shard(seeded(Stack), stage, accumulate=4)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        weights = []
        for number, batch in enumerate(batches, start=1):
            (model(*part(batch, rank, num_ranks)) / 4).backward()
            if number == 6:
                onecopy.save(tmp_path, model, optimizer)
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                weights.append(gathered_weights(model))
        assert_same_weights(weights[1], expected.weights)

        resumed = onecopy.shard(seeded(Stack), stage, accumulate=4)
        optimizer = OPTIMIZERS["adamw"](resumed.parameters())
        onecopy.load(tmp_path, resumed, optimizer)
        assert_same_weights(gathered_weights(resumed), weights[0], atol=0)
        for batch in batches[4:]:
            (resumed(*part(batch, rank, num_ranks)) / 4).backward()
        optimizer.step()
        assert_same_weights(gathered_weights(resumed), expected.weights)

    yield On(num_ranks, run)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(10, 10)
        self.down = nn.Linear(10, 2, bias=False)
        self.up = nn.Linear(2, 10, bias=False)
        self.base.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(10, 3)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


@every_stage
@one_fork
def test_trainable_parameters_alone_are_saved_and_loaded_beside_frozen_ones(
    stage: int, num_ranks: int, tmp_path: Path
) -> Forked:
    """Oracle: the run that goes on. Frozen values come from elsewhere; what is missing otherwise is an error."""
    batches = vector_batches(4)

    def run(rank: int) -> list[str]:
        def steps(model: nn.Module, optimizer: torch.optim.Optimizer, some: list[tuple[Tensor, ...]]) -> None:
            for batch in some:
                model(*part(batch, rank, num_ranks)).backward()
                optimizer.step()
                optimizer.zero_grad()

        model = onecopy.shard(seeded(LowRank), stage)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, batches[:2])
        path = onecopy.save(tmp_path, model, optimizer, trainable_only=True).wait()
        steps(model, optimizer, batches[2:])

        torch.manual_seed(99)
        other = LowRank()
        for name, parameter in other.named_parameters():
            if not parameter.requires_grad:
                parameter.data.copy_(dict(seeded(LowRank).named_parameters())[name])
        onecopy.shard(other, stage)
        optimizer = AdamW(other.parameters(), lr=1e-2)
        onecopy.load(tmp_path, other, optimizer)
        steps(other, optimizer, batches[2:])
        assert_same_weights(gathered_weights(other), gathered_weights(model), atol=0)
        assert other.blocks[0].calls == 4

        unfrozen = seeded(LowRank)
        unfrozen.blocks[1].base.weight.requires_grad_(True)
        with pytest.raises(CheckpointError, match=r"only in the model: blocks\.1\.base\.weight") as caught:
            onecopy.load(tmp_path, onecopy.shard(unfrozen, stage))
        assert "base.bias" not in str(caught.value)
        with pytest.raises(CheckpointError, match="trainable parameters alone"):
            onecopy.export(tmp_path, tmp_path / "out")
        with pytest.raises(UsageError, match="frozen"):
            onecopy.save(tmp_path, seeded(LowRank).requires_grad_(False), trainable_only=True)
        saved = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
        return sorted(key for key in saved if key.startswith("model."))

    kept = ["down.weight", "up.weight", "calls"]
    expected = [f"model.blocks.{block}.{name}" for block in (0, 1) for name in kept] + ["model.head.bias"]
    assert (yield On(num_ranks, run))[0] == sorted(expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@one_fork
def test_all_ranks_export_a_run_together(num_ranks: int, tmp_path: Path) -> Forked:
    """Each writes a share of the files. Oracle: the weights as they are gathered."""

    def run(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(Stack), 2)
        onecopy.save(tmp_path / "run", model)
        done = onecopy.export(tmp_path / "run", tmp_path / "out", file_bytes=1500)
        assert len(done.files) > 4
        with pytest.raises(SettingsError, match="new or empty"):
            onecopy.export(tmp_path / "run", tmp_path / "out")
        (tmp_path / "file").touch()
        with pytest.raises(SettingsError, match="cannot write"):
            onecopy.export(tmp_path / "run", tmp_path / "file" / "out")
        return gathered_weights(model)

    expected = (yield On(num_ranks, run))[0]
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(tmp_path / "out" / listed[name])[name] for name in expected}
    assert_same_weights(found, expected, atol=0)
    assert not list(tmp_path.glob(".exporting*"))


@one_fork
def test_whole_weights_of_a_plain_model_export_too(tmp_path: Path) -> Forked:
    def run(rank: int) -> dict[str, Tensor]:
        onecopy.save(tmp_path / "run", seeded(Stack))
        onecopy.export(tmp_path / "run", tmp_path / "out", dtype=torch.bfloat16)
        return {name: tensor.bfloat16() for name, tensor in whole_weights(seeded(Stack)).items()}

    expected = (yield On(1, run, group=False))[0]
    assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), expected, atol=0)
