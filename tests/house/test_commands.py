"""Commands in README.md and docs/ are understood by what they call. Oracles: the command line itself; the files.

Nothing is run. Each option of `onecopy` is parsed; each script, example and test that is named is there.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import pages
from onecopy.cli.main import make_app
from onecopy.cli.train import short_names
from places import ROOT

_STARTS = ("onecopy ", "python ", "pytest", "torchrun ", "pip install ", "sudo python ")
_SHELL = {"&&", "||", ";", "|"}


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines of code blocks, fenced as a shell's or indented, with those that go on joined."""
    fence, going_on = None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if match := re.match(r"```(\w*)$", line):
            fence = None if fence is not None else match[1]
        elif fence in ("sh", "bash", "console") or (fence is None and line.startswith("    ")):
            going_on += line.strip().removesuffix("\\") + " "
            if not line.endswith("\\"):
                yield number, going_on.strip().removeprefix("$ ")
                going_on = ""


def _commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(page):
        # Variables before a command, and where its output goes, are the shell's.
        line = re.sub(r"^(?:\w+=\S+ +)+| > \S+", "", line)
        if not line.startswith(_STARTS):
            continue
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in _SHELL:
                command.append(word)
            elif command:
                yield number, command
                command = []


def _found() -> list[Any]:
    return [
        pytest.param(command, id=f"{page.relative_to(ROOT)}:{number} {' '.join(command)[:60]}")
        for page in pages.sources()
        if "reference" not in page.parts
        for number, command in _commands(page)
    ]


@pytest.mark.parametrize("command", _found())
def test_command_is_understood(command: list[str]) -> None:
    words = command[1:] if command[0] == "sudo" else command
    # Placeholders stand for files that a reader has; `$common` for options that a line above sets.
    words = [word for word in words if not word.startswith("$")]
    match words:
        case ["onecopy", *rest]:
            _check_onecopy(rest)
        case ["python", "-m", *_]:
            pass
        case ["python", script, *options]:
            assert (ROOT / script).is_file(), script
            source = (ROOT / script).read_text(encoding="utf-8")
            for option in options:
                if option.startswith("--"):
                    assert f'"{option.partition("=")[0]}"' in source, f"{script} has no {option}"
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


def test_commands_are_found() -> None:
    """Guards the test above against finding none."""
    found = [param.values[0][0] for param in _found()]
    assert {"onecopy", "python", "pytest", "torchrun", "pip", "sudo"} <= set(found)
    with pytest.raises(Exception, match="no-such-option"):
        _check_onecopy(["plan", "7e9", "--no-such-option", "3"])
