"""The planner knows Muon: what its states weigh, how evenly matrices lie, what its arithmetic takes.

Oracles: the engine's own meter on CPU ranks; the paper's operation count by hand; AdamW's plan, of which it is a part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
import torch

import onecopy
from commands import command
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.planner.answer.advice import Wishes, options
from onecopy.planner.answer.estimate import Job, Option, estimate, update_seconds
from onecopy.planner.answer.paste import shard_call
from onecopy.planner.engine.simulate import describe_units
from onecopy.planner.machine.machine import Machine, gpu_named
from onecopy.planner.model.shape import from_count, from_sizes
from onecopy.planner.model.whole import balance, newton_schulz_operations
from onecopy.sharding.model.chosen import hidden_matrices
from oracle import part

GPU = gpu_named("h100")
assert GPU is not None
MACHINE = Machine(8, GPU)


@pytest.mark.parametrize("num_ranks", [2, 3])
@one_fork
def test_states_and_shares_are_the_engines(num_ranks: int) -> Forked:
    """Of each rank the elements that lie whole, and bytes of states within the padding of slices."""

    def run(rank: int) -> tuple[int, int, int]:
        model = seeded(TinyGPT, dim=48, layers=3)
        names = {*hidden_matrices(model)}
        named = list(model.named_parameters())
        muon = torch.optim.Muon([p for name, p in named if name in names])
        adamw = torch.optim.AdamW([p for name, p in named if name not in names])
        onecopy.shard(model, 3, optimizer=[muon, adamw])
        model(*part(token_batches(1)[0], rank, num_ranks)).backward()
        muon.step()
        adamw.step()
        owned = sum(p.slicing.numel for p in muon.param_groups[0]["params"])
        return owned, onecopy.meter(model).live["optimizer"], len(adamw.state)

    model = TinyGPT(dim=48, layers=3)
    named = dict(model.named_parameters())
    shapes = tuple(tuple(named.pop(name).shape) for name in hidden_matrices(model))
    planned = balance(shapes, sum(p.numel() for p in named.values()), num_ranks)
    found = yield On(num_ranks, run)
    assert sorted(owned for owned, *_ in found) == sorted(planned.whole)
    for rank, (_, nbytes, counters) in enumerate(found):
        assert nbytes - 4 * counters == pytest.approx(planned.state_bytes(rank), rel=0.02)
    assert planned.holds == pytest.approx(
        max(a + b for a, b in zip(planned.whole, planned.cut, strict=True))
        * num_ranks
        / sum(p.numel() for p in model.parameters())
    )


def test_described_units_have_the_blocks_matrices() -> None:
    units = describe_units(lambda: TinyGPT(dim=256), None)
    found = [shape for unit in units for shape in unit.matrices]
    model = TinyGPT(dim=256)
    expected = [tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("shape", [from_sizes(12, 768), from_count(124e6)], ids=["sizes", "count"])
def test_a_plan_with_muon_is_adamws_less_one_state_of_each_matrix(shape: object) -> None:
    """And five times 4m²n + 2m³ operations for each matrix, spread over the ranks as evenly as they lie."""
    job = Job(shape, 1024)  # type: ignore[arg-type]
    muon = replace(job, implementation="muon")
    whole = sum(map(prod, job.shape.matrices))
    assert 0.6 < whole / job.shape.parameters < 0.75
    for stage, shards in ((0, 1), (3, 8)):
        option = Option(stage, 1, 1, "off", "none", 8)
        plain, found = estimate(job, MACHINE, option), estimate(muon, MACHINE, option)
        less = plain.peaks["step"]["optimizer"] - found.peaks["step"]["optimizer"]
        assert less == pytest.approx(4 * whole / shards, rel=0.01)
        assert found.bytes_sent == plain.bytes_sent
        assert found.seconds.update > 0
    rows = [sorted(matrix) for matrix in job.shape.matrices]
    operations = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in rows)
    dearest = newton_schulz_operations(job.shape.matrices, job.shape.parameters - whole, 8)
    assert operations / 8 <= dearest <= 1.12 * operations / 8


def test_the_command_says_how_matrices_lie_and_what_to_write() -> None:
    asked = ["plan", "--layers", "12", "--hidden", "768", "--gpus", "8", "--optimizer", "muon"]
    code, output, _ = command(*asked, "--json")
    assert code in (0, 1)
    found = json.loads(output)
    assert any("48 matrices, each whole on one of 8 ranks" in note for note in found["notes"])
    assert any("computes 1.02 times the mean of them, the largest holds 1.00" in note for note in found["notes"])
    assert "whole=hidden" in found["shard_call"]
    assert "torch.optim.Muon(" in found["shard_call"]
    assert 'optimizer = "muon"' in found["config"]
    assert all("nvme" not in str(option) for option in found["options"])
    code, _, errors = command(*asked, "--tensor", "2")
    assert code == 2
    assert "needs whole matrices, which --tensor cuts" in errors


def test_what_is_pasted_runs() -> None:
    option = Option(3, 1, 1, "off", "none", 1)
    job = Job(from_sizes(2, 64), 64, precision="fp32", implementation="muon")
    names = {"onecopy": onecopy, "torch": torch, "model": seeded(TinyGPT)}
    exec(shard_call(job, estimate(job, Machine(1, GPU), option)), names)
    names["model"](*token_batches(1)[0]).backward()
    names["muon"].step()
    names["adamw"].step()
    assert len(names["muon"].state) == 8


def test_offloaded_matrices_are_multiplied_where_the_optimizer_steps() -> None:
    """Their operations by the paper's count, at the host's rate; of a GPU's host that rate is not known."""
    job = Job(from_sizes(4, 256), 128, implementation="muon")
    here = replace(MACHINE, gpus=2, computes_on_host=True)
    assert {option.offload for option in options(job, MACHINE, Wishes())} == {"none"}
    assert {option.offload for option in options(job, here, Wishes())} >= {"none", "optimizer on nvme"}
    option = Option(3, 1, 1, "off", "optimizer on nvme", 2)
    rows = [sorted(matrix) for matrix in job.shape.matrices]
    operations = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in rows) / 2
    taken, _ = update_seconds(job, here, option, 1e6, 0.0)
    plain, _ = update_seconds(replace(job, implementation="fused"), here, option, 1e6, 0.0)
    assert taken - plain == pytest.approx(operations / here.flops(256), rel=0.1)
