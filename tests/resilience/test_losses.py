"""Ranks are lost and come back. Oracle: the same run without losses, every result equal bit for bit.

`python benchmarks/recovery.py kills` is the same by the thousand; docs/recovery.md has its counts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import recovery
from ranks import run_ranks
from trained.survivor import Plan, train

pytestmark = pytest.mark.long

EVERY = 4


@pytest.mark.parametrize(
    "transport, plan, losses",
    [
        ("memory", Plan(stage=3, seed=1, scaler=True, kinds=("kill", "raise", "exit", "stop")), 16),
        ("sockets", Plan(stage=2, seed=2, accumulate=2), 12),
        ("memory", Plan(stage=3, seed=3, copies=2, save_every=3), 12),
    ],
    ids=["memory", "sockets", "copies"],
)
def test_losses_at_any_moment_change_no_bit(tmp_path: Path, transport: str, plan: Plan, losses: int) -> None:
    plan = replace(plan, steps=EVERY * losses, every=EVERY)
    (tmp_path / "whole").mkdir()
    whole = run_ranks(4, lambda _: train(replace(plan, every=0), tmp_path / "whole"), transport=transport)
    tally = recovery.compare(plan, tmp_path, transport=transport, heartbeat=3.0, whole=whole)
    assert sum(tally.losses.values()) >= losses
    assert tally.repairs >= losses or tally.restarts
    assert set(tally.losses) <= {*plan.kinds, "exit"}
