"""A sample of the crash scripts; docs/reliability.md has the counts of the whole ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import offload_kills
import power_cuts
from crash_kills import kill_at_random

pytestmark = pytest.mark.long


def test_ranks_killed_at_random_moments_lose_no_checkpoint(tmp_path: Path) -> None:
    tally = kill_at_random(tmp_path, 8, seed=7)
    assert tally.kills >= 8


def test_power_cuts_lose_no_checkpoint_and_would_without_syncs(tmp_path: Path) -> None:
    """The same trace without its syncs must lose some, or the replay would prove nothing."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace to trace system calls with")
    allowed = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"strace may not trace here: {allowed.stderr.strip()}")
    lines = power_cuts.trace(tmp_path)
    tally = power_cuts.replay(tmp_path, lines, 90)
    assert tally.cuts >= 90
    # Beside it, 40 for each save: a trace that was not understood would have none.
    assert tally.calls > 40 * power_cuts.SAVES
    shutil.rmtree(tmp_path / "cut", ignore_errors=True)
    with pytest.raises(AssertionError):
        power_cuts.replay(tmp_path, [line for line in lines if "sync(" not in line and "sync resumed" not in line], 90)


def test_kills_of_runs_with_states_on_disk_leave_no_file_and_harm_no_checkpoint(tmp_path: Path) -> None:
    tally = offload_kills.kill_at_random(tmp_path, 4)
    assert tally.kills >= 4
