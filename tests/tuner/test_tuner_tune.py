"""The call around the search: journal, budget, interruption, what is handed back. Probes are told, not run, but once.

Oracles: what the told probes say; `onecopy train`'s own reading of a config; the browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

import onecopy
from commands import command
from onecopy.errors import SettingsError, WriteError
from onecopy.planner.machine import here
from onecopy.planner.machine.calibration import Calibration, write_calibration
from onecopy.recipes.checks import check
from onecopy.recipes.settings import load
from onecopy.tuner.candidate import Candidate
from onecopy.tuner.job import check_candidate, configured, job_of, keys_to_paste
from onecopy.tuner.journal import Journal
from onecopy.tuner.page import render
from onecopy.tuner.probe.crew import Crew
from onecopy.tuner.probe.order import Length, Limits, Report
from onecopy.tuner.space import Space, read_space
from onecopy.tuner.tune import JOURNAL, Wanted, objective_of, search_for, tune
from onecopy.tuner.workload import OwnLoop
from ranks import run_ranks
from train_runs import environment
from tuned_loops import MACHINE, Net, batches, build

pytestmark = pytest.mark.long

LOOP = OwnLoop(build, batches)
SPACE = Space(micro_batch=(2, 4, 8), checkpointing=("off",), prefetch=(1,))


class Told(Crew):
    """Ranks that answer at once: the lower the stage the faster, and stage 0 runs out of memory.

    Args:
        interrupt_at: the number of the probe during which Ctrl-C is pressed.
    """

    size, device = 2, "cpu"

    def __init__(self, interrupt_at: int = 0, error: str = "") -> None:
        self.asked: list[Candidate] = []
        self._interrupt_at = interrupt_at
        self._error = error

    def probe(self, candidate: Candidate, length: Length, limits: Limits) -> list[Report]:
        self.asked.append(candidate)
        if len(self.asked) == self._interrupt_at:
            raise KeyboardInterrupt
        return [self._report(candidate, rank) for rank in range(candidate.ranks)]

    def _report(self, candidate: Candidate, rank: int) -> Report:
        if self._error:
            return Report(rank, "forward", 0, 1, error=self._error, base=200_000_000, peak=210_000_000)
        if candidate.stage == 0:
            return Report(rank, "backward", 0, 1, memory=True, error="MemoryError", base=200_000_000, peak=299_000_000)
        seconds = 0.1 * candidate.stage + 0.4 / candidate.micro_batch
        metered = {"optimizer": 1000, "activations": 10}
        peak = 200_000_000 + 10_000_000 * candidate.micro_batch
        return Report(rank, "step", 3, 0, steps=[1.0, *[seconds] * 4], base=200_000_000, peak=peak, metered=metered)


def _wanted(directory: Path | None = None, **values: Any) -> Wanted:
    known: dict[str, Any] = {
        "global_batch": 16,
        "space": SPACE,
        "memory": 300_000_000,
        "directory": directory,
        "calibrate": False,
        "machine": MACHINE,
    }
    return Wanted(**known | values)


@pytest.fixture(scope="module")
def tuned() -> onecopy.tuner.tuned.Tuned:  # type: ignore[name-defined]
    return search_for(LOOP, _wanted(), crew=Told())


def test_the_best_is_the_fastest_that_fits(tuned: Any) -> None:
    """Oracle: the seconds that `Told` makes up."""
    assert (tuned.best.candidate.stage, tuned.best.candidate.micro_batch) == (1, 8)
    assert tuned.runner_up.candidate != tuned.best.candidate
    assert re.search(r"is the best of \d+ settings tried: 150\.0 ms", tuned.reason)
    assert re.search(r"The runner-up, stage .* is [\d.]+% slower", tuned.reason)
    assert {probe.outcome.kind for probe in tuned.probes} <= {"measured", "slow", "out of memory"}
    assert json.loads(json.dumps(tuned.as_dict()))["best"]["candidate"]["stage"] == 1
    assert tuned.arguments == {"stage": 1, "precision": None, "accumulate": 1, "prefetch": 1}


def test_what_is_to_be_pasted_is_what_shard_takes() -> None:
    """Oracle: `onecopy.shard` itself, given the text."""
    chosen = Candidate(2, 4, 2, 4, "units", "optimizer on nvme", 2, 1, 2, 2**20, "Sequential")
    found = search_for(LOOP, _wanted(), crew=Told())
    assert found.best is not None
    found = replace(found, best=replace(found.best, candidate=chosen), states="/states")
    text = found.shard_call
    assert 'init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))' in text
    assert 'offload=onecopy.Offload(optimizer="/states")' in text
    assert "activations=onecopy.Activations(partition=False)" in text

    def shard(rank: int) -> int:
        plain = replace(chosen, offload="none", replicate=1, ranks=2)
        call = replace(found, best=replace(found.best, candidate=plain)).shard_call  # type: ignore[type-var]
        names = {"onecopy": onecopy, "model": Net()}
        exec(call, names)
        return sum(1 for _ in names["model"].parameters())  # type: ignore[attr-defined]

    assert run_ranks(2, shard) == [8, 8]


def test_a_journal_is_gone_on_from(tmp_path: Path) -> None:
    first, second = Told(), Told()
    stopped = search_for(LOOP, _wanted(tmp_path, probes=2), crew=first)
    assert stopped.ended == "the budget is spent"
    assert len(first.asked) == 2
    with (tmp_path / JOURNAL).open("a") as file:
        # A machine went down amid a line.
        file.write('{"candidate": {"stage"')
    said: list[str] = []
    done = search_for(LOOP, _wanted(tmp_path), said.append, crew=second)
    assert said[0].startswith("going on after 2 probes")
    assert not set(first.asked) & set(second.asked)
    assert len(done.probes) == 2 + len(second.asked)
    third = Told()
    again = search_for(LOOP, _wanted(tmp_path), crew=third)
    assert not third.asked
    assert again.best is not None
    assert done.best is not None
    assert again.best.candidate == done.best.candidate


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    search_for(LOOP, _wanted(tmp_path, probes=1), crew=Told())
    with pytest.raises(SettingsError, match=r"something else \(global_batch differ\)"):
        search_for(LOOP, _wanted(tmp_path, global_batch=32), crew=Told())
    (tmp_path / JOURNAL).write_text("a poem\n")
    with pytest.raises(SettingsError, match="is no journal of probes"):
        search_for(LOOP, _wanted(tmp_path), crew=Told())
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        search_for(LOOP, _wanted(tmp_path / "file"), crew=Told())


def test_an_interruption_keeps_what_is_known(tmp_path: Path) -> None:
    found = search_for(LOOP, _wanted(tmp_path), crew=Told(interrupt_at=4))
    assert found.interrupted
    assert len(found.probes) == 3
    assert "the same command goes on" in found.ended
    assert len(Journal(tmp_path / JOURNAL, _identity(tmp_path)).known) == 3


def _identity(directory: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads((directory / JOURNAL).read_text().splitlines()[0])
    identity: dict[str, Any] = header["tuning"]
    return identity


def test_no_probe_starts_after_the_budget() -> None:
    crew = Told()
    found = search_for(LOOP, _wanted(budget=0.0), crew=crew)
    assert (crew.asked, found.best, found.ended) == ([], None, "the budget is spent")
    assert "No setting could be measured (none was tried)" in found.reason
    with pytest.raises(ValueError, match="nothing was found"):
        _ = found.arguments


def test_what_always_fails_ends_the_search_with_its_error() -> None:
    crew = Told(error="RuntimeError: mat1 and mat2")
    with pytest.raises(SettingsError, match=r"(?s)first 3 probes all failed.*crash in forward of step 1: .*mat1 and"):
        search_for(LOOP, _wanted(), crew=crew)
    assert len(crew.asked) == 3


def test_what_cannot_work_is_refused_before_any_probe() -> None:
    crew = Told()
    for values, words in (
        ({"space": Space(checkpointing=("units+cpu",))}, "ranks compute on the CPU"),
        ({"space": Space(tensor=(2,))}, "is for `onecopy tune`"),
        ({"global_batch": 3}, "cannot be split over 2 ranks"),
        ({"global_batch": 0}, "must be positive"),
    ):
        with pytest.raises(SettingsError, match=words):
            search_for(LOOP, _wanted(**values), crew=crew)
    with pytest.raises(SettingsError, match="did you mean 'tokens_per_second'"):
        objective_of("tokens")
    with pytest.raises(SettingsError, match="unknown key 'stages'"):
        tune(build, batches, global_batch=8, space={"stages": [1]}, machine=MACHINE)
    assert not crew.asked


# --- the training job


def test_settings_of_the_training_job_are_read_back(tmp_path: Path) -> None:
    """Oracle: `load`, which reads what `onecopy train` would."""
    config = load(None, {"parallel.device": "cpu", "data.batch": 16, "data.tokenizer": "bytes"})
    chosen = Candidate(3, 2, 2, 4, "units+cpu", "parameters on nvme", 2, 1, 2, 2**20, "GPT2Block")
    whole = configured(config, chosen, "/states")
    check(whole)
    (tmp_path / "best.toml").write_text(keys_to_paste(config, chosen, "/states"))
    read = load(str(tmp_path / "best.toml"), {"parallel.device": "cpu", "data.tokenizer": "bytes"})
    assert read == whole
    assert check_candidate(config, Candidate(0, 1, 1, 4, replicate=2), "") is not None


# --- the page


def test_the_page_shows_every_probe_and_loads_nothing(tuned: Any, tmp_path: Path) -> None:
    text = render(tuned)
    kinds = [probe.outcome.kind for probe in tuned.probes]
    assert text.count('class="probe ') == len(kinds) - kinds.count("out of memory")
    assert text.count('class="between"') == text.count('class="probe ')
    assert text.count('class="cross" d=') == kinds.count("out of memory") > 0
    assert text.count('class="chosen" cx') == 1
    assert 'id="beyond"' in text
    assert "<script" not in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)


def test_the_page_fits_a_telephone(tuned: Any, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    (tmp_path / "tuning.html").write_text(render(tuned))
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        for width in (1400, 400):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto((tmp_path / "tuning.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()


# --- the command

_CONFIG = """
[model]
layers = 1
hidden = 32
heads = 2
[data]
sequence_length = 16
batch = 8
[parallel]
device = "cpu"
"""


def test_the_command_goes_on_after_ctrl_c_and_teaches_the_planner(tmp_path: Path) -> None:
    """Once for real; what comes after is told, not probed."""
    (tmp_path / "config.toml").write_text(_CONFIG)
    (tmp_path / "space.toml").write_text('stage = [1, 2, 3]\nmicro_batch = [4]\ncheckpointing = ["off"]\n')
    job = job_of(load(str(tmp_path / "config.toml"), {}))
    wanted = _wanted(global_batch=8, space=read_space(tmp_path / "space.toml"), memory=None, objective="memory")
    # A journal that knows the machine: nothing needs to be measured of it.
    identity = job.identity() | {"global_batch": 8, "ranks": 2, "device": "cpu", "memory": None}
    journal = Journal(tmp_path / "tuned" / JOURNAL, identity)
    values = {field.name: getattr(MACHINE, field.name) for field in fields(MACHINE)}
    journal.keep_machine({"values": values | {"gpu": MACHINE.gpu._asdict()}, "words": "made up"})
    journal.close()
    arguments = ["tune", str(tmp_path / "config.toml"), "--space", str(tmp_path / "space.toml"), "--timed", "0.1s"]
    arguments += ["--directory", str(tmp_path / "tuned"), "--objective", "memory"]
    running = subprocess.Popen(
        [sys.executable, "-m", "onecopy.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")),
    )
    assert running.stderr is not None
    # The first probe's line; the next one has begun when it can be read.
    assert "stage" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 130, output + errors
    shown = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert shown["interrupted"]
    assert {probe["outcome"]["kind"] for probe in shown["probes"]} == {"measured"}
    assert "onecopy.shard(model, stage=" in output
    assert load(str(tmp_path / "tuned" / "best.toml"), {}).parallel.ranks == 2
    assert (tmp_path / "tuned" / "tuning.html").exists()
    assert len(list((tmp_path / "cache" / "onecopy").glob("calibration-*.json"))) == 1
    said: list[str] = []
    search_for(job, replace(wanted, directory=tmp_path / "tuned"), said.append, Told())
    assert said[0].startswith(f"going on after {len(shown['probes'])} probes")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--budget", "20"], "--budget must be a time like"),
        (["--memory", "24"], "a size needs a unit"),
        (["--space", "nowhere.toml"], "cannot read the space"),
        (["--objective", "speed"], "objective must be one of"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], words: str, tmp_path: Path) -> None:
    code, _, errors = command("tune", *arguments, folder=tmp_path)
    assert code == 2
    assert words in errors
    assert not list(tmp_path.iterdir())


def test_plan_here_uses_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "look", lambda gpus: (MACHINE, "here: made up"))
    write_calibration(Calibration(compute=10.0, probes=5))
    arguments = ("plan", "1e6", "--here", "--json", "--seq", "64", "--precision", "fp32")
    seconds = {}
    for option in ("--calibration", "--no-calibration"):
        code, output, errors = command(*arguments, option)
        assert code == 0, errors
        assert ("calibrated by 5 probes" in errors) is (option == "--calibration")
        seconds[option] = json.loads(output)["best"]["seconds"]["compute"]
    assert seconds["--calibration"] > 3 * seconds["--no-calibration"]
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)
    assert asdict(Calibration())["compute"] == 1.0
