"""`onecopy train` with `[recovery]` loses two ranks, the first one among them. Oracle: a run that lost nothing."""

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

STEPS = 60
SETTINGS = {
    "schedule.steps": STEPS,
    "checkpoint.save_every": 20,
    "evaluation.evaluate_every": 15,
    "run.profile_step": 0,
    "recovery.mirror": True,
}


def _children(process: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_two_lost_ranks_change_no_loss_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process of its own, or the norm would be summed in another order.
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)
    whole, _ = run_job(tmp_path / "whole", 3, SETTINGS | {"recovery.mirror": False})
    directory = tmp_path / "run"
    options = [f"--{key}={str(value).lower()}" for key, value in {**SMALL, **SETTINGS}.items()]
    command = [sys.executable, "-m", "onecopy.cli.main", "train", *options, "--ranks=3", "--spares=1"]
    launcher = subprocess.Popen(
        [*command, f"--directory={directory}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
        output, _ = launcher.communicate(timeout=90)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, output
    assert output.count("a spare takes its place") == 2, output
    records, summary = read_run(directory)
    losses = {(record["kind"], record["step"]): record["loss"] for record in whole if record["kind"] != "recovery"}
    found = [record for record in records if record["kind"] != "recovery"]
    # A rank 0 that ends between a step and its line takes the line along.
    assert len(losses) - 1 <= len(found) <= len(losses)
    assert all(losses[record["kind"], record["step"]] == record["loss"] for record in found)
    repairs = [record for record in records if record["kind"] == "recovery"]
    assert [record["ranks"] for record in repairs] == [1.0, 1.0], output
    steps = ", ".join(str(record["step"]) for record in repairs)
    assert f"lost ranks came back before steps {steps}, which took" in headline(read_report(directory))
    assert summary["steps"] == STEPS
    assert not summary["interrupted"]
