"""`onecopy train` as a person meets it: a command, its ranks, its errors, and what is left when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from commands import command
from onecopy.recipes.config import Config
from onecopy.recipes.settings import keys
from train_runs import COMMAND, TINY, environment, long_run, onecopy, read_run

# --- without training


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.argv = ['onecopy', 'train', '--help']\n"
        "from onecopy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(str({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert ended.stderr.strip() == "set()"
    for key in keys():
        assert f"--{key.name.replace('_', '-')} " in ended.stdout
        for word in (key.field.description or "").split():
            assert word in ended.stdout


def test_the_versions_are_those_of_the_packages() -> None:
    ended = onecopy("--version")
    assert (ended.returncode, ended.stdout.strip()) == (
        0,
        f"onecopy {metadata.version('onecopy')}, torch {metadata.version('torch')}",
    )


def test_printed_config_is_the_default() -> None:
    ended = onecopy("train", "--print-config")
    assert ended.returncode == 0
    assert Config.model_validate(tomllib.loads(ended.stdout)) == Config()


def test_config_file_and_options_together(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[parallel]\nstage = 1\n[schedule]\nsteps = 7\n")
    options = [
        "--stage",
        "2",
        "--optimizer.clip_norm=0.5",
        "--train",
        "a.txt",
        "--data.train",
        "b",
        "--tensorboard=false",
    ]
    ended = onecopy("train", str(tmp_path / "c.toml"), *options, "--print-config")
    found = tomllib.loads(ended.stdout)
    assert (found["parallel"]["stage"], found["schedule"]["steps"]) == (2, 7)
    assert found["optimizer"]["clip_norm"] == 0.5
    assert found["data"]["train"] == ["a.txt", "b"]
    assert found["run"]["tensorboard"] is False


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--stgae", "3"], ["error: unknown option '--stgae'; did you mean '--stage'?"]),
        (["--model.layer", "3"], ["unknown option '--model.layer'; did you mean '--layers'?"]),
        (["--data.clip-norm=3"], ["unknown option '--data.clip-norm'; did you mean '--clip-norm'?"]),
        (["--stage", "5"], ["error: parallel.stage", "found 5"]),
    ],
)
def test_wrong_options(arguments: list[str], words: list[str]) -> None:
    ended = onecopy("train", *arguments)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr


# --- training


def test_own_ranks_from_a_config_file(tmp_path: Path) -> None:
    rows = [{"body": f"line {number} of text, {number % 7} and {number % 5}. "} for number in range(600)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "config.toml").write_text(
        f"""
        [data]
        train = ["{tmp_path / "rows.jsonl"}"]
        text_field = "body"
        tokenizer = "train"
        vocabulary = 300
        [optimizer]
        learning_rate = 0.01
        [schedule]
        steps = 12
        [parallel]
        accumulate = 2
        """
    )
    directory = tmp_path / "run"
    ended = onecopy("train", str(tmp_path / "config.toml"), *TINY, "--directory", str(directory))
    assert (ended.returncode, ended.stderr) == (0, "")
    records, summary = read_run(directory)
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    # Stage 3, N = 2, g = 2, fp32: 3gΨ(N-1)/N elements of 4 bytes.
    assert summary["bytes_sent_per_step"]["total"]["measured"] == 3 * 2 * summary["padded_parameters"] // 2 * 4
    assert len(summary["peak_memory"]) == 2
    assert {path.name.split(".")[0] for path in directory.iterdir()} == {
        "config",
        "machine",
        "metrics",
        "summary",
        "events",
        "tokenizer",
        "trace",
        "checkpoints",
    }
    resolved = tomllib.loads((directory / "config.toml").read_text())
    assert resolved["parallel"] | {"ranks": 2, "device": "cpu", "accumulate": 2} == resolved["parallel"]
    assert resolved["run"]["directory"] == str(directory)
    for words in ("step 12/12", "validation loss", "tokens/s", "peak memory by rank", "formula in Ψ"):
        assert words in ended.stdout

    # The same config again: no run overwrites another, and no rank is started to find that out.
    code, _, errors = command("train", str(directory / "config.toml"))
    assert code == 2
    assert "must be new or empty" in errors
    assert read_run(directory)[0] == records


def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    directory = tmp_path / "run"
    job = ["-m", "onecopy.cli.main", "train", *TINY, "--steps=3", "--stage=1", "--accumulate=4"]
    ended = subprocess.run(
        [*torchrun, *job, f"--directory={directory}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary = read_run(directory)[1]
    assert (summary["shard"], summary["micro_batches"]) == (2, 4)
    # Stage 1: 2Ψ(N-1)/N whatever g.
    assert summary["bytes_sent_per_step"]["total"]["measured"] == 2 * summary["padded_parameters"] // 2 * 4
    assert ended.stdout.count("peak memory by rank") == 1


# --- endings


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_ctrl_c_ends_all_cleanly(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with long_run(directory) as (launcher, ranks):
        assert len(ranks) == 2
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 130
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert errors == ""
    records, summary = read_run(directory)
    assert summary["interrupted"]
    assert f"stopped by a signal after step {summary['steps']}" in output
    # The logs were closed with the last step in them.
    assert records[-1]["step"] == summary["steps"]


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, as the kernel writes them."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    waiting = "0A"
    return {row[1].partition(":")[0] for row in rows if row[3] == waiting and f"socket:[{row[9]}]" in own}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_ranks_listen_on_loopback_alone_and_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Oracle: the kernel's table of sockets. Nor is a temporary file left."""
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    with long_run(tmp_path / "run") as (launcher, ranks):
        seen = [listening(pid) for pid in (launcher.pid, *ranks)]
        assert seen[0]
        assert set().union(*seen) <= loopback
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
def test_a_run_whose_directory_is_deleted_does_not_end_well(tmp_path: Path) -> None:
    with long_run(tmp_path / "run") as (launcher, _):
        shutil.rmtree(tmp_path / "run")
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "was deleted" in errors
    assert "Traceback" not in errors


def test_a_failing_rank_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import onecopy.recipes.data as data\n"
        "    def load(self, places): raise LookupError('only rank 1 knows this')\n"
        "    data.Batches._load = load\n"
    )
    start = time.monotonic()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ended = onecopy("train", *TINY, "--evaluate-every=0", "--directory", str(tmp_path / "run"), PYTHONPATH=path)
    assert ended.returncode == 1
    assert time.monotonic() - start < 60
    assert ended.stderr.startswith("rank 1 failed:\nTraceback")
    assert "LookupError: only rank 1 knows this" in ended.stderr
    # Rank 0's loss of its peer is a line, not a second traceback.
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.count("rank 0 stopped:") <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("ranks, room, file", [(1, 2, "run"), (2, 2, "run"), (2, 16, "run/tokens-0.bin")])
def test_a_full_disk_is_one_message(ranks: int, room: int, file: str, tmp_path: Path) -> None:
    """Oracle: the kernel, which lets no file of these processes grow beyond ``room`` KiB; config.toml takes 5."""
    (tmp_path / "text.txt").write_text("Some words to learn. " * 600)
    arguments = ["train", *TINY, "--steps=2", "--batch=2", "--train=text.txt", "--tokenizer=bytes", f"--ranks={ranks}"]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -f {room}; exec "$@"', "-", *COMMAND, *arguments, "--directory=run"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"error: cannot write {file!r}: File too large" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_log_that_cannot_be_written_names_it() -> None:
    from onecopy.errors import WriteError
    from onecopy.recipes.metrics import JsonLines, Record, writing

    log = JsonLines(Path("/dev/full"))
    with pytest.raises(WriteError, match="cannot write 'run': No space left on device"), writing(Path("run")):
        log.write(Record("train", 1, {"loss": 1.0}))
