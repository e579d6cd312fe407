"""The job stopped and resumed. Oracle: the same job that never stopped."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from jobs import CPU, SMALL, dotted, run_job
from onecopy.errors import SettingsError
from onecopy.recipes.checks import check, resolve
from onecopy.recipes.data import Batches
from onecopy.recipes.settings import load
from onecopy.recipes.train import train
from onecopy.recipes.world import World
from ranks import run_ranks

SETTINGS = {"schedule.steps": 9, "run.profile_step": 0, "checkpoint.save_every": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    # Fewer sequences than the job reads: it comes to a second epoch.
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(60)))
    return path


def run(directory: Path, text: Path, size: int, **overrides: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return run_job(directory, size, SETTINGS | {"data.train": [str(text)]} | dotted(overrides))


def losses(records: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    return [(record["kind"], record["step"], record["loss"]) for record in records]


@pytest.mark.parametrize("stage, accumulate, background", [(3, 1, False), (1, 3, True)])
def test_resumed_job_writes_what_the_unbroken_one_wrote(
    text: Path, tmp_path: Path, stage: int, accumulate: int, background: bool
) -> None:
    settings = {
        "parallel__stage": stage,
        "parallel__accumulate": accumulate,
        "checkpoint__save_in_background": background,
    }
    expected, summary = run(tmp_path / "whole", text, 2, **settings)
    checkpoints = tmp_path / "whole" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        ".writer",
        "latest",
        "step-00000006",
        "step-00000009",
    ]
    assert (summary["steps"], summary["resumed_at"]) == (9, 0)
    assert summary["checkpoint"] == str(checkpoints / "step-00000009")

    # A run that died in step 8: the last checkpoint is of step 6, and lines after it have been written.
    directory = shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(directory / "checkpoints" / "step-00000009")
    for size in (2, 3):
        again = shutil.copytree(directory, tmp_path / f"again{size}")
        with (again / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
        # Three ranks cannot split 12 rows into three micro-batches.
        more = settings if size == 2 else {**settings, "parallel__accumulate": 1}
        records, resumed = run(again, text, size, **more, checkpoint__resume="auto")
        if size == 2:
            assert losses(records) == losses(expected)
        else:
            # An evaluation's rows depend on the number of ranks.
            found, wanted = ([row for row in losses(r) if row[0] == "train"] for r in (records, expected))
            assert [step for _, step, _ in found] == [step for _, step, _ in wanted]
            assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in wanted], rel=2e-5)
        assert (resumed["steps"], resumed["resumed_at"]) == (9, 6)
        assert resumed["checkpoint"] == str(again / "checkpoints" / "step-00000009")


def test_auto_begins_at_the_start_where_there_is_nothing_and_does_nothing_where_all_is_done(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path / "run", text, 1, checkpoint__resume="auto", schedule__steps=3)
    assert first[1]["steps"] == 3
    assert run(tmp_path / "run", text, 1, checkpoint__resume="auto", schedule__steps=3) == first
    assert "nothing to do" in capfd.readouterr().out
    # Another run may go on from this one's checkpoint, in a directory of its own.
    source = str(tmp_path / "run" / "checkpoints" / "step-00000003")
    records, summary = run(tmp_path / "other", text, 1, checkpoint__resume=source, schedule__steps=5)
    assert [record["step"] for record in records if record["kind"] == "train"] == [4, 5]
    assert (summary["steps"], summary["resumed_at"]) == (5, 3)


def test_other_data_order_is_an_error(text: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", text, 1, schedule__steps=1)
    config = load(
        None,
        {
            **SMALL,
            **SETTINGS,
            "data.train": [str(text)],
            "data.batch": 6,
            "parallel.ranks": 1,
            "run.directory": str(tmp_path / "run"),
            "checkpoint.resume": "auto",
        },
    )

    def rank_main(rank: int) -> None:
        with pytest.raises(SettingsError, match=r"saved with data\.batch = 12"):
            train(config, World(0, 0, 1, CPU))

    run_ranks(1, rank_main, group=False)


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    for overrides, words in (
        ({"checkpoint.resume": "auto"}, "name it"),
        ({"checkpoint.resume": str(tmp_path / "none")}, "found"),
        ({"checkpoint.save_every": 0, "checkpoint.keep": 5}, "would do nothing"),
    ):
        with pytest.raises(SettingsError, match=words):
            check(resolve(load(None, overrides)))


def test_steps_after_some_are_those_that_iteration_reaches() -> None:
    rows = numpy.arange(70).reshape(10, 7)
    batches = Batches(rows, World(0, 0, 1, CPU), batch=4, accumulate=2, seed=3)
    for skipped in (0, 1, 5, 7):
        for found, wanted in zip(islice(batches.after(skipped), 4), islice(batches, skipped, skipped + 4), strict=True):
            assert all(torch.equal(f["input_ids"], w["input_ids"]) for f, w in zip(found, wanted, strict=True))
