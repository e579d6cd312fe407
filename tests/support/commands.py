"""The command line, called in a forked process that need not import torch again."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from onecopy.cli.main import main
from ranks import run_ranks


def command(*arguments: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of `onecopy`, run in ``folder`` in a process that need not import torch again."""

    def rank_main(rank: int) -> tuple[int, str, str]:
        sys.argv = ["onecopy", *arguments]
        os.environ["COLUMNS"] = "200"
        if folder is not None:
            os.chdir(folder)
            sys.path.insert(0, str(folder))
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), output.getvalue(), errors.getvalue()

    return run_ranks(1, rank_main, group=False)[0]  # type: ignore[no-any-return]
