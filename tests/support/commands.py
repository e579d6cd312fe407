"""The command line, called in a forked process that need not import torch again."""

from __future__ import annotations

import io
import os
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from onecopy.cli.main import main
from ranks import run_ranks


def command(*arguments: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of `onecopy`, run in ``folder`` in a process that need not import torch again."""
    return run_ranks(1, called, folder, *arguments, group=False)[0]  # type: ignore[no-any-return]


def called(rank: int, folder: Path | None, *arguments: str) -> tuple[int, str, str]:
    """The same in this process, which may do so again."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["onecopy", *arguments]),
        mock.patch.object(sys, "path", [*([] if folder is None else [str(folder)]), *sys.path]),
        mock.patch.dict(os.environ, COLUMNS="200"),
        nullcontext() if folder is None else chdir(folder),
        redirect_stdout(output),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return int(ended.value.code or 0), output.getvalue(), errors.getvalue()
