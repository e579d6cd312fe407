"""Commands in README.md and docs/ are understood by what they call. Oracles: the command line itself; the files.

Nothing is run here but parsers; `test_commands_run.py` runs them.
"""

from __future__ import annotations

import io
import re
import runpy
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from onecopy.cli.main import make_app
from onecopy.cli.train import short_names
from page_commands import Command, commands
from places import ROOT
from ranks import run_ranks

_FOUND = commands()


@pytest.mark.parametrize("command", _FOUND, ids=str)
def test_command_is_understood(command: Command) -> None:
    words = command.words[1:] if command.words[0] == "sudo" else command.words
    match list(words):
        case ["onecopy", *rest]:
            _check_onecopy(rest)
        case ["python", "-m" | "-c" | "train.py" | "script.py", *_]:
            pass
        case ["python", script, *options]:
            assert (ROOT / script).is_file(), script
            source = _source(ROOT / script)
            for option in options:
                if option.startswith("--"):
                    assert f'"{option.partition("=")[0]}"' in source, f"{script} has no {option}"
            if options:
                [(code, said)] = run_ranks(1, _ask_the_script, script, options, group=False)
                assert code == 0, said
        case ["pytest", *rest]:
            for word in rest:
                if "/" in word:
                    assert (ROOT / word.partition("::")[0]).exists(), word
        case ["torchrun", *rest]:
            programs = [word for word in rest if word.endswith(".py") and "/" in word]
            assert all((ROOT / program).is_file() for program in programs), programs
        case ["pip", "install", *rest]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for asked in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(asked.split(",")) <= set(extras)


def _source(script: Path) -> str:
    """A script's text, and that of the files beside it that it imports."""
    own = script.read_text(encoding="utf-8")
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"^(?:import|from) (\w+)", own, re.MULTILINE)]
    return "\n".join([own, *(path.read_text(encoding="utf-8") for path in beside if path.is_file())])


def _check_onecopy(words: list[str]) -> None:
    """Typer parses the words, files that are named aside."""
    group: Any = typer.main.get_command(make_app())
    context = group.make_context("onecopy", [], resilient_parsing=True)
    if words[0].startswith("-"):
        assert any(words[0] in parameter.opts for parameter in group.params) or words[0] == "--help"
        return
    name, *rest = words
    command = group.commands[name]
    if name == "train":
        rest = short_names(["train", *rest])[1:]
    if "--help" not in rest:
        command.make_context(name, rest, parent=context)


def _ask_the_script(_: int, script: str, options: list[str]) -> tuple[int, str]:
    """Exit code and words of a script that is asked for help after ``options``: it has parsed them by then."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *options, "--help"]),
        mock.patch.object(sys, "path", [str((ROOT / script).parent), *sys.path]),
        redirect_stdout(said),
        redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return int(ended.value.code or 0), said.getvalue()


def test_commands_are_found() -> None:
    """Guards the tests above against finding none."""
    assert {"onecopy", "python", "pytest", "torchrun", "pip", "sudo"} <= {command.words[0] for command in _FOUND}
    assert {True, False} == {command.block for command in _FOUND}
    with pytest.raises(Exception, match="no-such-option"):
        _check_onecopy(["plan", "7e9", "--no-such-option", "3"])
    [(code, said)] = run_ranks(1, _ask_the_script, "benchmarks/loss.py", ["--dtype", "no-such-dtype"], group=False)
    assert code == 2, said
