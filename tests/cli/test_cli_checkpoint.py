"""`onecopy inspect`, `export`, `import-deepspeed` and `train --resume auto` as a person meets them."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import onecopy as package
from commands import command
from models import TinyGPT, seeded
from onecopy.checkpoint.export import export
from onecopy.errors import CheckpointError
from ranks import run_ranks
from train_runs import TINY, long_run, read_run, wait_until


def _save(rank: int, directory: Path) -> None:
    model = package.shard(seeded(TinyGPT), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in (10, 20):
        package.save(directory, model, optimizer, step=step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "c"
    run_ranks(2, _save, directory)
    return directory


def test_inspect_says_what_is_in_it_and_its_exit_code_whether_it_is_whole(saved: Path) -> None:
    code, output, errors = command("inspect", str(saved / "step-00000020"))
    assert (code, errors) == (0, "")
    parameters = sum(p.numel() for p in TinyGPT().parameters())
    for words in (
        "step-00000020  (latest)",
        "whole (every byte checked)",
        "step 20",
        "saved by 2 ranks",
        "stage 2",
        f"{parameters:,} float32",
        "tied: head.weight is tokens.weight",
        "lr 0.25",
        "loads in onecopy.load on 2 ranks: goes on bit for bit",
    ):
        assert words in output
    both = json.loads(command("inspect", "--json", str(saved))[1])
    assert [found["step"] for found in both] == [20, 10]
    assert [found["latest"] for found in both] == [True, False]
    assert both[0]["sections"]["parameters and buffers"]["elements"] == parameters

    file = saved / "step-00000010" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    code, output, _ = command("inspect", str(saved))
    assert code == 1
    assert "DAMAGED: the content of file '__1_0.distcp' has changed since it was written" in output
    assert command("inspect", "--quick", str(saved))[0] == 0
    file.write_bytes(content)
    code, output, errors = command("inspect", str(saved.parent))
    assert (code, output) == (2, "")
    assert errors.startswith("error: there is no checkpoint in")


def test_errors_of_export_and_import(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, words in (
        (["export", str(saved), str(tmp_path / "full")], "must be new or empty"),
        (["export", str(saved), str(tmp_path / "new"), "--dtype", "int4"], "--dtype must be one of saved, fp32"),
        (["import-deepspeed", str(saved), str(tmp_path / "new")], "only checkpoints of ZeRO stages 1, 2 and 3"),
    ):
        code, _, errors = command(*arguments)
        assert code == 2
        assert errors.startswith("error: ")
        assert words in errors
    assert not (tmp_path / "new").exists()


def test_an_export_onto_a_full_disk_is_one_message_and_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    """Oracle: the kernel, which lets no file of this process grow beyond 2 KiB."""

    def run(rank: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
        with pytest.raises(CheckpointError) as caught:
            export(saved, tmp_path / "new")
        return str(caught.value)

    (message,) = run_ranks(1, run, group=False)
    assert "cannot write" in message
    assert "File too large" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_a_job_whose_rank_is_killed_goes_on_and_its_model_is_exported(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    latest = directory / "checkpoints" / "latest"
    with long_run(directory) as (launcher, ranks):
        wait_until(latest.exists, launcher)
        time.sleep(0.2)
        os.kill(ranks[1], signal.SIGKILL)
        launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    stopped = int(latest.read_text().strip().removeprefix("step-"))
    where = ["--directory", str(directory), "--resume", "auto"]
    code, output, _ = command("train", *TINY, "--steps", str(stopped + 3), *where, "--ranks", "1")
    assert code == 0
    assert f"step-{stopped:08d}, step {stopped}, saved by 2 ranks" in output
    records, summary = read_run(directory)
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == list(range(1, stopped + 4))
    assert summary["checkpoint"] == str(directory / "checkpoints" / f"step-{stopped + 3:08d}")

    out = tmp_path / "out"
    code, output, errors = command("export", str(directory / "checkpoints"), str(out))
    assert (code, errors) == (0, "")
    assert "model.safetensors" in output

    def load(rank: int) -> int:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        return sum(p.numel() for p in model.parameters())

    assert run_ranks(1, load, group=False)[0] == summary["parameters"]
