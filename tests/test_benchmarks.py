"""What benchmarks say about what they measured. Oracles: hand-made measurements; ZeRO's formulas; torch alone.

Nothing here is timed: `python benchmarks/compare.py --fast` is a report.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

# Benchmarks are what is tested here; they are no part of the package.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
import ledger_cost
import overhead
import scaling
import systems
from cases import CASES, count
from contest import Contest, Timed, Weighed, Work, hold
from ranks import run_ranks

WORK = Work("gpt-3m", "fp32", micro_batches=2, ranks=2, samples=1, size=8, steps=2, warmup=1)


def _contest() -> Contest:
    """DDP took 1, 2 and 4 s; onecopy's stage 1 half of it each time; stage 2 as much, but its losses went astray."""
    timed = {
        "DDP": Timed([1.0, 2.0, 4.0], [0.1] * 3, [5.0] * 3, 0.0),
        "onecopy stage 1": Timed([0.5, 1.0, 2.0], [0.1] * 3, [5.0] * 3, 1e-6),
        "onecopy stage 2": Timed([0.5, 1.0, 2.0], [0.1] * 3, [5.0] * 3, 0.5),
    }
    weighed = {
        "onecopy stage 1": Weighed(80 * 2**20, None, None, None, 1.0),
        "DDP + ZeroRedundancyOptimizer": Weighed(100 * 2**20, None, None, None, 1.0),
    }
    return Contest(WORK, 10, 10, timed, weighed, {"DeepSpeed stage 1": "deepspeed is not installed"})


def test_ratios_are_taken_step_by_step_and_held_against_the_target() -> None:
    assert _contest().ratio("onecopy stage 1", "DDP") == (0.5, 0.5, 0.5)
    text = compare.report(_contest())
    assert "| onecopy stage 1 | DDP | time ≤ 0.95 | 0.50 (0.50 – 0.50) | met |" in text
    assert "| onecopy stage 1 | DDP + ZeroRedundancyOptimizer | RSS ≤ 1.00 | 0.80 | met |" in text


def test_a_time_with_other_losses_is_not_counted_and_is_named() -> None:
    text = compare.report(_contest())
    assert "not counted: onecopy stage 2, whose losses differ by 5.0e-01 (allowed: 1e-03)" in text
    assert "onecopy stage 2 | DDP |" not in text


def test_what_was_left_out_is_named_with_its_reason() -> None:
    assert "left out: DeepSpeed stage 1: deepspeed is not installed" in compare.report(_contest())


def test_every_target_names_systems_that_exist() -> None:
    assert {name for target in compare.TARGETS for name in (target.system, target.peer)} <= set(systems.SYSTEMS)


def test_cases_have_the_sizes_that_their_papers_give() -> None:
    """ResNet-50: 25.557 M (torchvision's count of the same table). LoRA: 2 layers x rank 8 x (in + out) in 8 blocks."""
    assert count(CASES["resnet50"]) == (25_557_032, 25_557_032)
    assert count(CASES["lora"])[1] == 8 * 8 * ((512 + 1536) + (512 + 512))
    everything, _ = count(CASES["llama"])
    vocabulary = 65536 * 256
    assert everything - vocabulary == pytest.approx(4e6, rel=0.02)


def test_a_contest_of_two_ranks_finds_equal_losses_and_the_meters_states() -> None:
    """Oracle: DDP's losses; for memory 4 + 4 + 8 bytes of Ψ/2 (stage 3, fp32) as the least there can be."""
    chosen = {name: systems.SYSTEMS[name] for name in ("DDP", "onecopy stage 3")}
    contest = hold(WORK, chosen, weigh=True, network=False, limit=60.0)
    assert contest.left_out == {}
    assert set(contest.agreeing) == set(chosen)
    ours, ddp = (contest.timed[name] for name in ("onecopy stage 3", "DDP"))
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert len(ours.seconds) == WORK.steps
    parameters, _ = count(CASES["gpt-3m"])
    weighed = contest.weighed["onecopy stage 3"]
    assert weighed.meter is not None
    assert 12 * parameters / 2 <= sum(weighed.meter.values()) < 16 * parameters
    assert weighed.formula == 16 * parameters / 2
    # 3gΨ(N-1)/N elements of 4 bytes, ZeRO §7.
    assert weighed.paper == 3 * 2 * parameters / 2 * 4
    assert contest.weighed["DDP"].resident > weighed.resident


def test_a_system_that_fails_alone_is_left_out_by_name() -> None:
    def fail(model: torch.nn.Module, settings: systems.Settings) -> systems.Trainer:
        raise RuntimeError("it does not run here")

    chosen = {"DDP": systems.SYSTEMS["DDP"], "broken": systems.System(0, fail)}
    contest = hold(WORK, chosen, weigh=True, network=False, limit=60.0)
    assert contest.left_out == {"broken": "RuntimeError: it does not run here"}
    assert list(contest.timed) == ["DDP"]


def _on_fake_groups(rank: int) -> tuple[list[str], scaling.Point, float]:
    measured = overhead.measure(overhead.Case("linear", layers=4, ranks=8, stage=3), rounds=2)
    point = scaling.measure("gpt-3m", stage=3, ranks=8, layers=0, rounds=0)
    cost = ledger_cost.seconds_of_a_booking([ledger_cost.Entry("all_gather", "forward", "", "shard", 1, 8, 0, 0)], 10)
    return list(measured.collectives), point, cost


def test_on_the_fake_group_phases_are_told_apart_and_bytes_are_the_papers() -> None:
    """Oracle: ZeRO §5 and §7 for stage 3 on 8 ranks in bf16: 16Ψ/N bytes held, 3Ψ(N-1)/N elements sent."""
    [(phases, point, cost)] = run_ranks(1, _on_fake_groups, group=False)
    assert phases == ["forward", "backward", "step"]
    parameters, _ = count(CASES["gpt-3m"])
    assert point.held == pytest.approx(16 * parameters / 8, rel=0.01)
    assert point.sent == pytest.approx(3 * parameters * 7 / 8 * 2, rel=0.01)
    assert cost > 0


def test_the_scaling_page_needs_nothing_from_outside_and_shows_every_point() -> None:
    points = [scaling.Point(s, n, 10**6, 10**6, 10**6, 1.0, 100.0) for s in scaling.STAGES for n in (8, 64)]
    page = scaling.page(points, 10**6, "a model")
    assert "http" not in page
    assert "src=" not in page
    drawn = [ElementTree.fromstring(scaling.svg(chart)) for chart in scaling.charts(points, 10**6)]
    assert [len(chart.findall("circle")) for chart in drawn] == [len(points)] * 4
