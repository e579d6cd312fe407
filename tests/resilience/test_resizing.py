"""Ranks become fewer and more in memory. Oracle: plain loops on as many ranks, from checkpoint to checkpoint.

`python benchmarks/recovery.py resize` is the same by the hundred.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import recovery
from ranks import run_ranks
from trained.survivor import Plan, train_a_stretch


def _train_in_stretches(plan: Plan, folder: Path, ran: Path, transport: str) -> list[dict[str, object]]:
    """The results of runs that stop wherever ranks have changed."""
    found: list[dict[str, object]] = []
    folder.mkdir()
    for stretch in recovery.stretches(ran, plan.steps, 4):
        found = run_ranks(
            len(stretch.streams), lambda _, one=stretch: train_a_stretch(plan, folder, one), transport=transport
        )
    return found


def _compare(plan: Plan, folder: Path, transport: str, *options: str) -> recovery.Ended:
    ended = recovery.carry_out(plan, folder / "run", spares=0, transport=transport, options=options)
    expected = _train_in_stretches(plan, folder / "stretches", folder / "run", transport)
    assert len(ended.results) == len(expected), ended.output
    for own, found in zip(expected, ended.results, strict=True):
        assert recovery.differences(own, found) == {}, recovery.stretches(folder / "run", plan.steps, 4)
    return ended


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, plan",
    [
        ("memory", Plan(stage=3, seed=21, scaler=True)),
        ("sockets", Plan(stage=2, seed=22, accumulate=2)),
        ("memory", Plan(stage=1, seed=23, global_batch=12)),
        ("sockets", Plan(stage=0, seed=24, global_batch=12)),
    ],
    ids=["stage 3", "stage 2", "stage 1", "stage 0"],
)
def test_fewer_ranks_go_on_as_from_a_checkpoint(tmp_path: Path, transport: str, plan: Plan) -> None:
    plan = replace(plan, steps=10, every=4, last_loss=6, again=0.0)
    ended = _compare(plan, tmp_path, transport, "--min-ranks", "1", "--rejoin", "inf")
    assert len(ended.losses) == 2
    assert len(ended.results) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, point", [("memory", "vote"), ("sockets", "drafted"), ("memory", "drafted"), ("sockets", "switched")]
)
def test_a_rank_is_lost_while_slices_are_cut_anew(tmp_path: Path, transport: str, point: str) -> None:
    plan = Plan(stage=3, seed=31, steps=6, every=6, again=1.0, again_points=(point,), kinds=("kill",))
    ended = _compare(plan, tmp_path, transport, "--min-ranks", "1", "--rejoin", "inf")
    assert sorted(name.split("-")[0] for name in ended.losses) == ["again", "lost"]
    assert len(ended.results) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, plan",
    [
        ("memory", Plan(stage=3, seed=41, scaler=True, global_batch=12)),
        ("sockets", Plan(stage=2, seed=42, accumulate=2)),
    ],
    ids=["memory", "sockets"],
)
def test_ranks_that_return_go_on_as_from_a_checkpoint(tmp_path: Path, transport: str, plan: Plan) -> None:
    plan = replace(plan, steps=24, every=4, last_loss=9, ranks=4, pause=0.4)
    ended = _compare(plan, tmp_path, transport, "--min-ranks", "2", "--rejoin", "0.2")
    sizes = [len(one.streams) for one in recovery.stretches(tmp_path / "run", plan.steps, 4)]
    assert min(sizes) < 4
    assert sizes[-1] == 4 or sizes[-1] > min(sizes), ended.output
