"""`onecopy run`: what it does when nothing can be repaired, and what it says. Oracle: the scripts' own words."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.long

_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import onecopy

folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "usage":
    sys.exit(2)
onecopy.join(timeout=30)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
onecopy.shard(model, 3, mirror=how not in ("bare", "copies"), copies=2 if how == "copies" else 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
run = onecopy.resilient(model, optimizer, checkpoints=folder / "checkpoints", save_every=2)


def once(name):
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


for number in run.loop(lambda step: range(step, 8)):
    with run:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).pow(2).mean().backward()
        if how == "bug" and rank == 1 and run.steps == 3:
            raise ValueError("a bug in the script")
        if how in ("both", "bare") and rank < (2 if how == "both" else 1) and run.steps == 5 and once(f"lost-{rank}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "one by one" and run.steps in (3, 7) and rank == run.steps // 4 and once(f"lost-{run.steps}"):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
for _ in run.attempts():
    with run:
        run.save()
with torch.no_grad(), onecopy.gathered(model):
    (folder / f"result-{rank}.json").write_text(json.dumps([run.steps, model.weight.tolist()]))
if how == "late" and rank == 1 and once("late"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, how: str, *options: str, ranks: int = 2) -> tuple[int, str, list[str]]:
    """Exit code, what was said, and each rank's result."""
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "onecopy.cli.main", "run", "--ranks", str(ranks), *options]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(script), str(folder), how], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr, _results(folder)


def _results(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("result-*.json"))]


def _be(rank: int, folder: Path) -> None:
    """Run the script on a rank that nobody has to launch."""
    sys.argv = ["script.py", str(folder), "not at all"]
    runpy.run_path(str(folder / "script.py"), run_name="__main__")


def test_where_both_holders_are_lost_all_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    whole, lossy, bare = (tmp_path / name for name in ("whole", "lossy", "bare"))
    for folder in (whole, lossy, bare):
        folder.mkdir()
    (whole / "script.py").write_text(_SCRIPT)
    run_ranks(3, _be, whole)
    expected = _results(whole)
    assert len(expected) == 3
    code, said, found = _run(lossy, "both", ranks=3)
    assert (code, found) == (0, expected), said
    assert "is lost: all ranks begin again, from the newest checkpoint" in said
    assert "going on from" in said
    assert "step 4" in said
    # Without a mirror nobody holds what one rank has lost.
    code, said, found = _run(bare, "bare", ranks=3)
    assert (code, found) == (0, expected), said
    assert "every rank that held slice 0 of 3 is lost" in said


def test_under_torchrun_a_lost_rank_starts_all_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    whole, lossy = tmp_path / "whole", tmp_path / "lossy"
    for folder in (whole, lossy):
        folder.mkdir()
        (folder / "script.py").write_text(_SCRIPT)
    run_ranks(2, _be, whole)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.05"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(lossy / "script.py"), str(lossy), "bare"]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, _results(lossy)) == (0, _results(whole)), done.stderr
    assert "going on from" in done.stderr
    assert "step 4" in done.stderr


def test_a_bug_ends_the_job_after_the_limit_with_its_traceback(tmp_path: Path) -> None:
    code, said, found = _run(tmp_path, "bug", "--losses", "2", "--spares", "1")
    assert (code, found) == (1, [])
    assert "the 3rd loss within an hour: giving up. The last traceback:\nTraceback" in said
    assert said.rstrip().endswith("ValueError: a bug in the script")


def test_a_rank_that_is_lost_after_the_last_step_ends_the_job_and_nothing_hangs(tmp_path: Path) -> None:
    code, said, found = _run(tmp_path, "late")
    assert (code, len(found)) == (1, 2), said
    assert "others had come to the end of the script" in said


def test_a_script_that_refuses_its_arguments_is_not_started_again(tmp_path: Path) -> None:
    code, said, _ = _run(tmp_path, "usage")
    assert code == 2
    assert "begin again" not in said


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onecopy.cli.main", "run", str(tmp_path / "none.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no file" in done.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        (["--ranks", "2", "--min-ranks", "3"], "--min-ranks 3 is more than --ranks 2"),
        (["--ranks", "2", "--rejoin", "5"], "--rejoin says something beside a --min-ranks below --ranks alone"),
    ],
    ids=["more", "alone"],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-m", "onecopy.cli.main", "run", *options, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr


def test_fewer_ranks_are_refused_where_each_slice_has_two_holders_by_copies(tmp_path: Path) -> None:
    code, said, found = _run(tmp_path, "copies", "--min-ranks", "1", "--rejoin", "inf")
    assert (code, found) == (1, []), said
    assert "among which each slice cannot have several holders: shard with mirror=True" in said


def test_where_the_last_rank_is_lost_all_begin_again(tmp_path: Path) -> None:
    code, said, found = _run(tmp_path, "one by one", "--min-ranks", "1", "--rejoin", "inf")
    assert code == 0, said
    assert "rank 0 ended by SIGKILL (often the host has run out of memory); 1 go on" in said
    assert "and there is no other one: all ranks begin again, from the newest checkpoint" in said
    assert "step 6" in said
    assert len(found) == 2
