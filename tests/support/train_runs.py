"""Runs of `onecopy train` as a user starts them, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "onecopy.cli.main"]


TINY = ["--layers=1", "--hidden=32", "--heads=2", "--sequence-length=32", "--device=cpu"]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what torchrun sets."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"COLUMNS": "120"} | more


def onecopy(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environment(**more), check=False
    )


def read_run(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records and the summary in a run directory."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return records, json.loads((directory / "summary.json").read_text())


@contextmanager
def long_run(directory: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run that would take hours, once it trains: its launcher, and the pids of its ranks."""
    arguments = ["train", *TINY, "--steps=1000000", "--save-every=40", "--directory", str(directory)]
    launcher = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(directory.parent), **more),
        start_new_session=True,
    )
    try:
        wait_until(lambda: (directory / "metrics.jsonl").exists() and len(read_lines(directory)) > 2, launcher)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        yield launcher, list(map(int, children))
    finally:
        launcher.kill()
        launcher.communicate()


def read_lines(directory: Path) -> list[str]:
    return (directory / "metrics.jsonl").read_text().splitlines()


def wait_until(condition: Any, launcher: subprocess.Popen[str], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
