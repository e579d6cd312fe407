"""`onecopy train` with `[recovery]` loses two ranks, the first one among them, and has a slow one.

Oracle: a run that lost nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import SMALL, run_job
from onecopy.report.run import read_run as read_report
from onecopy.report.tables import headline
from onecopy.sharding.model import discover
from train_runs import environment, read_lines, read_run, wait_until

pytestmark = pytest.mark.long

STEPS = 90
SETTINGS = {
    "schedule.steps": STEPS,
    "checkpoint.save_every": 20,
    "evaluation.evaluate_every": 15,
    "run.profile_step": 0,
    "recovery.mirror": True,
    "recovery.heartbeat": 3.0,
}


def _children(process: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_two_lost_ranks_change_no_loss_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process of its own, or the norm would be summed in another order.
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)
    whole, _ = run_job(tmp_path / "whole", 3, SETTINGS | {"recovery.mirror": False, "recovery.heartbeat": 0})
    directory = tmp_path / "run"
    options = [f"--{key}={str(value).lower()}" for key, value in {**SMALL, **SETTINGS}.items()]
    command = [sys.executable, "-m", "onecopy.cli.main", "train", *options, "--ranks=3", "--spares=1"]
    said = tmp_path / "output"
    with said.open("w") as file:
        launcher = subprocess.Popen(
            [*command, f"--directory={directory}"],
            stdout=file,
            stderr=file,
            env=environment(TMPDIR=str(tmp_path)),
            start_new_session=True,
        )

    def lines(number: int) -> bool:
        return (directory / "metrics.jsonl").exists() and len(read_lines(directory)) > number

    try:
        for victim, after in ((1, 8), (0, 35)):
            wait_until(lambda number=after: lines(number), launcher)
            # The zygote forks ranks in their order, and spares after them.
            (zygote,) = _children(launcher.pid)
            os.kill(_children(zygote)[victim], signal.SIGKILL)
        wait_until(lambda: lines(48), launcher)
        # The only one of the first three that is left.
        (zygote,) = _children(launcher.pid)
        slow = _children(zygote)[0]
        os.kill(slow, signal.SIGSTOP)
        wait_until(lambda: "rank 2 is slow" in said.read_text(), launcher)
        os.kill(slow, signal.SIGCONT)
        launcher.wait(timeout=90)
    finally:
        launcher.kill()
        launcher.wait()
    output = said.read_text()
    assert launcher.returncode == 0, output
    assert output.count("a spare takes its place") == 2, output
    records, summary = read_run(directory)
    losses = {(record["kind"], record["step"]): record["loss"] for record in whole}
    found = [record for record in records if "loss" in record]
    # A rank 0 that ends between a step and its line takes the line along.
    assert len(losses) - 1 <= len(found) <= len(losses)
    assert all(losses[record["kind"], record["step"]] == record["loss"] for record in found)
    repairs = [record for record in records if record["kind"] == "recovery"]
    assert [record["ranks"] for record in repairs] == [[1], [0]], output
    assert all(0 < record["seconds"] <= record["lost_seconds"] < 60 for record in repairs), repairs
    slow_ones = [record for record in records if record["kind"] == "slow"]
    assert [(record["ranks"], record["given_up"]) for record in slow_ones] == [([2], 0.0)], output
    assert slow_ones[0]["seconds"] > 1.5
    cost = sum(record["lost_seconds"] for record in repairs)
    assert f"ranks lost 2 times, which cost {cost:.2f} s" in headline(read_report(directory))
    assert summary["steps"] == STEPS
    assert not summary["interrupted"]
