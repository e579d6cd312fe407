"""`onecopy train --resume auto` under torchrun's own restarts: killed twice, it ends as if nobody had touched it.

Oracle: the losses of a run that nobody touched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import SMALL, run_job
from onecopy.sharding.model import discover
from train_runs import environment, read_lines, read_run, wait_until

pytestmark = pytest.mark.long

STEPS = 120
SETTINGS = {"schedule.steps": STEPS, "checkpoint.save_every": 10, "evaluation.evaluate_every": 0, "run.profile_step": 0}
SLOW = """
import os, time
if "RANK" in os.environ:
    from onecopy.recipes.metrics import JsonLines
    write = JsonLines.write
    def slowly(self, record):
        write(self, record)
        time.sleep(0.03)
    JsonLines.write = slowly
"""
"""Gives the test time to kill a rank in the middle."""


def _ranks(launcher: subprocess.Popen[str]) -> list[int]:
    return sorted(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))


def _kill(launcher: subprocess.Popen[str], directory: Path, victim: int, *, after: int, gone: set[int]) -> None:
    """Kill a rank once the run has so many lines of metrics, and no rank of ``gone`` any more."""

    def due() -> bool:
        if not (directory / "metrics.jsonl").exists() or len(read_lines(directory)) <= after:
            return False
        ranks = _ranks(launcher)
        return len(ranks) == 2 and not gone & set(ranks)

    wait_until(due, launcher)
    os.kill(_ranks(launcher)[victim], signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_two_kills_under_torchrun_change_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process of its own, or the norm would be summed in another order.
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)
    whole, _ = run_job(tmp_path / "whole", 2, SETTINGS)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    directory = tmp_path / "run"
    options = [f"--{key}={str(value).lower()}" for key, value in {**SMALL, **SETTINGS}.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    job = ["-m", "onecopy.cli.main", "train", *options, f"--directory={directory}", "--resume=auto"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    launcher = subprocess.Popen(
        [*launch, *job],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PYTHONPATH=path, TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    try:
        _kill(launcher, directory, 1, after=25, gone=set())
        _kill(launcher, directory, 0, after=75, gone=set(_ranks(launcher)))
        output, _ = launcher.communicate(timeout=90)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, output
    assert output.count("going on from") == 2
    records, summary = read_run(directory)
    assert [(r["step"], r["loss"]) for r in records] == [(r["step"], r["loss"]) for r in whole]
    assert summary["steps"] == STEPS
