"""Probes in real processes: what runs, and every way to fail. Oracles: where the loop was made to fail; the kernel."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onecopy.errors import SettingsError
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.outcome import Outcome, outcome_of
from onecopy.tuner.probe.client import Host
from onecopy.tuner.probe.crew import Local
from onecopy.tuner.probe.groups import Group
from onecopy.tuner.probe.order import Length, Limits, Order
from onecopy.tuner.space import Space
from onecopy.tuner.tune import Wanted, search_for, tune
from onecopy.tuner.workload import OwnLoop
from places import ROOT
from train_runs import environment
from tuned_loops import MACHINE, MUCH, Faulty, batches, build, fails, no_batch, one_too_many

pytestmark = pytest.mark.long

SHORT = Length(seconds=0.0, least=3, most=3)
ROOM = 150 * 2**20
"""Bytes beyond those of a process without a model: more than the small model takes, less than what fails asks for."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Local]:
    with Local(Faulty(build, batches), 2, "cpu") as made:
        yield made


@pytest.fixture(scope="module")
def base(crew: Local) -> int:
    """Bytes of a rank before its model, as a probe without a limit says."""
    return _probe(crew, fails(""), Limits()).base


def _probe(crew: Local, candidate: Candidate, limits: Limits) -> Outcome:
    start = time.monotonic()
    return outcome_of(crew.probe(candidate, SHORT, limits), limits, time.monotonic() - start)


def test_a_probe_times_steps_and_weighs_memory(crew: Local, base: int) -> None:
    """Oracle: AdamW's two states of stage 2 over two ranks are a copy of the parameters, 4 bytes each."""
    outcome = _probe(crew, fails(""), Limits(base + ROOM))
    assert (outcome.kind, outcome.message) == ("measured", "")
    assert len(outcome.steps) == 3
    assert outcome.timed is not None
    assert outcome.timed.warmup == 1
    parameters = sum(parameter.numel() for parameter in build().parameters())
    assert outcome.metered["optimizer"] == pytest.approx(2 * 4 * parameters / 2, rel=0.3)
    assert base < outcome.peak < base + ROOM


@pytest.mark.parametrize("phase", ["load", "forward", "backward", "step"])
def test_out_of_memory_is_data_with_its_phase_and_its_bytes(crew: Local, base: int, phase: str) -> None:
    limit = base + ROOM
    outcome = _probe(crew, fails(phase), Limits(limit))
    assert (outcome.kind, outcome.phase, outcome.step) == ("out of memory", phase, 0)
    assert outcome.limit == limit
    assert outcome.needs >= limit
    assert outcome.asked is None or outcome.asked >= MUCH
    assert f"in {phase}" in outcome.words()


def test_a_limit_below_the_model_ends_in_build_or_load(crew: Local, base: int) -> None:
    outcome = _probe(crew, fails(""), Limits(base - 2**20))
    assert outcome.kind == "out of memory"
    assert outcome.phase in (None, "build")


def test_a_rank_that_the_system_kills_ran_out_of_memory(crew: Local) -> None:
    outcome = _probe(crew, fails("killed"), Limits())
    assert (outcome.kind, outcome.phase, outcome.rank) == ("out of memory", "forward", 1)


def test_a_hang_ends_after_silence_and_says_where(crew: Local) -> None:
    limits = Limits(silence=1.0)
    outcome = _probe(crew, fails("hang"), limits)
    assert (outcome.kind, outcome.phase, outcome.rank) == ("hang", "forward", 1)
    assert outcome.message == "no sign of life for 1 s"
    assert outcome.took < 10


def test_a_probe_that_takes_too_long_hangs(crew: Local) -> None:
    outcome = _probe(crew, fails("hang"), Limits(silence=60.0, seconds=1.0))
    assert (outcome.kind, outcome.message) == ("hang", "not done within 1 s")


def test_a_crash_says_by_which_signal_and_takes_nothing_along(crew: Local) -> None:
    outcome = _probe(crew, fails("crash"), Limits())
    assert (outcome.kind, outcome.phase, outcome.rank) == ("crash", "forward", 1)
    assert outcome.message == f"ended by {signal.SIGSEGV.name}"
    assert _probe(crew, fails(""), Limits()).kind == "measured"


def test_an_error_of_the_model_is_told_with_its_traceback(crew: Local) -> None:
    outcome = _probe(crew, fails("raises"), Limits())
    assert (outcome.kind, outcome.phase) == ("crash", "forward")
    assert "KeyError: 'a fault of the model'" in outcome.message
    assert "tuned_loops.py" in outcome.traceback


def test_nothing_is_left_of_probes(crew: Local) -> None:
    """Oracle: the kernel's list of the host's children."""
    process = crew._host._process
    assert process is not None
    _probe(crew, fails("hang"), Limits(silence=0.5))
    assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() == ""


# --- a user's functions


def test_a_batch_function_that_makes_other_samples_fails_before_any_probe() -> None:
    with pytest.raises(SettingsError, match=r"batches\(1\) must make 1 samples.* found 2"):
        tune(build, one_too_many, global_batch=8, machine=MACHINE)
    with pytest.raises(SettingsError, match=r"must return a dict.* found list"):
        tune(build, no_batch, global_batch=8, machine=MACHINE)


def test_a_batch_function_that_fails_in_probes_ends_the_search_with_its_error(crew: Local) -> None:
    wanted = Wanted(6, Space(micro_batch=(3,)), machine=MACHINE, calibrate=False, length=SHORT)
    with pytest.raises(SettingsError, match=r"the batch cannot be made in a probe: OSError: no such file") as raised:
        search_for(Faulty(build, batches), wanted, crew=crew)
    assert "tuned_loops.py" in str(raised.value)


def test_functions_that_no_other_process_can_find_are_refused() -> None:
    with pytest.raises(SettingsError, match="must stand at the top of a module"):
        Host(OwnLoop(lambda: build(), batches), 1)


# --- the end of a host


def test_a_host_that_dies_is_replaced(crew: Local) -> None:
    process = crew._host._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    outcome = _probe(crew, fails(""), Limits())
    assert outcome.kind == "measured"


def test_ranks_end_with_the_tuner(crew: Local, tmp_path: Path) -> None:
    """A tuner that is killed leaves no rank behind: its host reads the end of its questions. Oracle: the kernel."""
    process = crew._host._process
    assert process is not None
    assert process.stdin is not None
    meeting = (tmp_path / "store").as_uri()
    process.stdin.write(pickle.dumps(Order(fails("hang"), [0, 1], [0, 1], 2, meeting, "cpu", 1, SHORT, Limits())))
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    _wait(lambda: len(children.read_text().split()) == 2)
    ranks = [int(pid) for pid in children.read_text().split()]
    process.stdin.close()
    process.wait(20)
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    crew._host.close()


def _wait(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# --- control groups


def test_control_groups_of_either_version_are_made_and_removed(tmp_path: Path) -> None:
    """Oracle: the files' names in the kernel's documentation of cgroup v1 and v2."""
    old, new = tmp_path / "v1", tmp_path / "v2"
    for place in (old, new):
        place.mkdir()
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (new / name).write_text("")
    for place, limit, events in (
        (old, "memory.limit_in_bytes", "memory.oom_control"),
        (new, "memory.max", "memory.events"),
    ):
        group = Group(place, 123_456_789, 2)
        made = sorted(place.glob("onecopy-*"))
        assert [(one / limit).read_text() for one in made] == ["123456789"] * 2
        for one in made:
            (one / events).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
        assert not group.ran_out()
        (made[1] / events).write_text("low 0\noom_kill 1\n")
        assert group.ran_out()
        group.enter(0)
        assert (made[0] / "cgroup.procs").read_text() == str(os.getpid())
        for one in made:
            for file in one.iterdir():
                file.unlink()
        group.remove()
        assert not list(place.glob("onecopy-*"))
    assert (new / "cgroup.subtree_control").read_text() == "+memory"


def test_a_place_without_control_groups_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no memory control group can be made in"):
        Group(tmp_path / "nowhere", 1, 1)


# --- given ranks

_GIVEN = """
import json, sys
sys.path.insert(0, {support!r})
from onecopy.tuner.probe.order import Length
from tuned_loops import MACHINE, batches, build
import onecopy

if __name__ == "__main__":
    found = onecopy.tune(
        build, batches, global_batch=8, space={{"stage": [0, 3], "micro_batch": [4], "checkpointing": ["off"],
        "prefetch": [1]}}, objective="memory", machine=MACHINE, calibration=False, length=Length(0.0, 3, 3),
        directory={directory!r},
    )
    print(json.dumps([found.ranks, len(found.probes), [p.outcome.kind for p in found.probes], found.best is not None]))
"""


def test_under_torchrun_it_tunes_with_the_ranks_it_was_given(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_GIVEN.format(support=str(ROOT / "tests" / "support"), directory=str(tmp_path / "tuned")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(program)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines: list[Any] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ['[2, 2, ["measured", "measured"], true]'] * 2
    assert len((tmp_path / "tuned" / "journal.jsonl").read_text().splitlines()) == 3
