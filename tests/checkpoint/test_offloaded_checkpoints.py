"""Checkpoints of states that rest on disk. Oracle: the run without offload that never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import AdamW

# What every rank would otherwise import for itself.
from transformers import LlamaConfig, LlamaForCausalLM

import onecopy
from models import Stack, seeded, vector_batches
from onecopy import Offload
from onecopy.sharding.tensor.resting import RestingTensor
from oracle import assert_same_weights, gathered_weights, part, whole_weights
from ranks import run_ranks


class Job:
    """A model, sharded with or without offload, and its optimizer."""

    def __init__(self, stage: int, offload: Offload | None) -> None:
        self.model: Any = onecopy.shard(seeded(Stack), stage, offload=offload)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        other = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = AdamW([{"params": decayed}, {"params": other, "weight_decay": 0.0}], lr=1e-2)

    def run(self, rank: int, num_ranks: int, steps: range) -> None:
        for step in steps:
            self.model(*part(vector_batches(6)[step], rank, num_ranks)).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()


def _everything_rests(job: Job) -> bool:
    states = [state[key] for state in job.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return bool(states) and all(isinstance(value, RestingTensor) for value in states)


@pytest.mark.parametrize("num_ranks, stage, parameters", [(1, 3, True), (2, 1, False), (3, 3, True)])
def test_a_run_goes_on_from_disk_to_memory_and_back(
    num_ranks: int, stage: int, parameters: bool, tmp_path: Path
) -> None:
    offload = Offload(tmp_path / "states", tmp_path / "states" if parameters else None)

    def run(rank: int) -> None:
        oracle = Job(stage, None)
        oracle.run(rank, num_ranks, range(6))
        expected = gathered_weights(oracle.model)
        for number, (first, second, third) in enumerate(((None, offload, None), (offload, None, offload))):
            place = tmp_path / f"checkpoints {number}"
            for part_number, where in enumerate((first, second, third)):
                job = Job(stage, where)
                if part_number:
                    loaded = onecopy.load(place, job.model, job.optimizer)
                    assert loaded.extra == part_number
                    if where is not None:
                        assert _everything_rests(job), "loaded into where states rest, before any step"
                job.run(rank, num_ranks, range(2 * part_number, 2 * part_number + 2))
                onecopy.save(place, job.model, job.optimizer, extra=part_number + 1, background=part_number == 1).wait()
            assert_same_weights(gathered_weights(job.model), expected, atol=0)

    run_ranks(num_ranks, run)


def test_a_checkpoint_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    offload = Offload(tmp_path / "states")

    def save(rank: int) -> dict[str, torch.Tensor]:
        job = Job(2, offload)
        job.run(rank, 2, range(2))
        onecopy.save(tmp_path / "checkpoints", job.model, job.optimizer)
        return _facts(job)

    def load(_: int) -> dict[str, torch.Tensor]:
        job = Job(3, offload)
        onecopy.load(tmp_path / "checkpoints", job.model, job.optimizer)
        return _facts(job)

    expected = run_ranks(2, save)[0]
    for found in run_ranks(3, load):
        assert_same_weights(found, expected, atol=0)


def _facts(job: Job) -> dict[str, torch.Tensor]:
    facts = gathered_weights(job.model)
    for name, parameter in job.model.named_parameters():
        with onecopy.gathered(job.optimizer.state[parameter]["exp_avg"]) as whole:
            facts[f"momentum of {name}"] = whole.clone()
    return facts


def test_torchs_own_checkpoints_load_into_where_states_rest(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        job = Job(3, Offload(tmp_path / "states", tmp_path / "states"))
        job.run(rank, 2, range(2))
        expected = _facts(job)
        states = {n: job.optimizer.state[p] for n, p in job.model.named_parameters()}
        dcp.save({"model": job.model.state_dict(), "states": states}, checkpoint_id=tmp_path / "dcp")
        job.run(rank, 2, range(2, 4))
        assert not torch.equal(_facts(job)["head.weight"], expected["head.weight"])
        dcp.load({"model": job.model.state_dict(), "states": states}, checkpoint_id=tmp_path / "dcp")
        assert_same_weights(_facts(job), expected, atol=0)

    run_ranks(2, run)


def test_a_load_holds_one_box_at_a_time(tmp_path: Path) -> None:
    """Bytes by torch's own profiler; what is loaded is 24 times the largest tensor."""

    def run(_: int) -> int:
        torch.manual_seed(0)
        width = 256
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
        model = onecopy.shard(model, 3, offload=Offload(tmp_path / "states", tmp_path / "states"))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        onecopy.save(tmp_path / "checkpoints", model, optimizer)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            onecopy.load(tmp_path / "checkpoints", model, optimizer)
        held = highest = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                highest = max(highest, held)
        return highest // (4 * width * width)

    assert run_ranks(1, run, group=False)[0] <= 6


def test_weights_of_transformers_load_into_files_and_come_out_whole(tmp_path: Path) -> None:
    """Oracles: the model that was saved by transformers; what `onecopy.gathered` shows."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )

    def save(_: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "saved")
        return whole_weights(model)

    def run(rank: int) -> None:
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config)
        onecopy.shard(model, 3, offload=Offload(tmp_path / "states", tmp_path / "states"))
        onecopy.load_pretrained(model, tmp_path / "saved")
        assert_same_weights(gathered_weights(model), expected, atol=0)
        tokens = torch.arange(8)[None] + rank
        model(input_ids=tokens, labels=tokens).loss.backward()
        AdamW(model.parameters(), lr=1e-2).step()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        found = gathered_weights(model)
        assert not torch.equal(found["lm_head.weight"], expected["lm_head.weight"])
        for name, weight in found.items():
            assert torch.equal(whole[name], weight)

    (expected,) = run_ranks(1, save, group=False)
    run_ranks(2, run)
