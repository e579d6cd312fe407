"""Ranks become fewer and more in memory. Oracle: plain loops on as many ranks, from checkpoint to checkpoint.

`python benchmarks/recovery.py resize` is the same by the hundred.
"""

from __future__ import annotations

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
        ("memory", Plan(stage=3, seed=21, steps=18, every=6, scaler=True)),
        ("sockets", Plan(stage=2, seed=22, steps=18, every=6, accumulate=2)),
        ("memory", Plan(stage=1, seed=23, steps=18, every=6, global_batch=12)),
        ("sockets", Plan(stage=0, seed=24, steps=18, every=6, global_batch=12)),
    ],
    ids=["stage 3", "stage 2", "stage 1", "stage 0"],
)
def test_fewer_ranks_go_on_as_from_a_checkpoint(tmp_path: Path, transport: str, plan: Plan) -> None:
    ended = _compare(plan, tmp_path, transport, "--min-ranks", "1", "--rejoin", "inf")
    assert len(ended.losses) >= 3
    assert len(ended.results) == 4 - len(ended.losses)
