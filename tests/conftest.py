# ruff: noqa: E402 (the environment must be set before torch is imported)
"""Settings of the whole suite: a parent process that starts no thread, and proof that nothing outlives it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# The thread pools of numpy and torch would not survive the forks in ranks.py.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# The allocator of pyarrow, which datasets imports, has a thread of its own otherwise.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
# Whatever is not whole holds NaN in the tests, so that whoever reads it too early is found out.
os.environ["ONECOPY_POISON"] = "1"

import pytest

pytest.register_assert_rewrite("oracle")

import torch

# What every rank would otherwise import for itself, some of it for seconds.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import covering
import onecopy
from onecopy.sharding.model import discover

# The package's names load at their first use.
assert all(getattr(onecopy, name) for name in onecopy.__all__)

torch.set_num_threads(1)
# Models of tests are tiny, and would be one unit each: the schedule of many units is what they are to show.
discover.SMALL_BYTES = 0


_WORTH_TELLING: Final = 60.0
"""Seconds of tests from which on the slowest files are named."""


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    if sys.platform == "linux":
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert not children, f"processes left at the end of the tests: {children}"
    folders = list(Path(tempfile.gettempdir()).glob(f"onecopy-ranks-{os.getpid()}-*"))
    assert not folders, f"temporary folders left at the end of the tests: {folders}"


_MOST_WORKERS: Final = 4
"""Each takes some 1 GB, and its ranks as many cores as they are."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs in as many processes as there are cores; chosen files, or what takes long, in one."""
    whole = config.args == config.getini("testpaths") and "not long" in config.option.markexpr
    workers = min(_MOST_WORKERS, os.cpu_count() or 1) if whole else 1
    if workers == 1:
        return 0
    # Tests of one file share what they have made.
    config.option.dist = "loadfile"
    return workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        covering.mark_rest(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which files take the time."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > _WORTH_TELLING:
        terminalreporter.section("slowest 10 files")
        for name, total in seconds.most_common(10):
            terminalreporter.write_line(f"{total:7.1f} s  {name}")
