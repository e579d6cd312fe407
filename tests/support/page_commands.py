"""The commands that README.md, CONTRIBUTING.md and docs/ tell a reader to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pages
from places import ROOT

_STARTS: Final = ("onecopy ", "python ", "pytest", "torchrun ", "pip install ", "sudo python ")
_SHELL: Final = {"&&", "||", ";", "|"}


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        words: as a shell hands them on.
        environment: the variables that are written before it.
        output: the file that its output goes to, or "".
        page: the page, relative to the repository.
        line: its number in there.
        block: whether it stands in a code block; else it is named in a sentence.
    """

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    output: str
    page: Path
    line: int
    block: bool

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text[:60]}"


def commands() -> list[Command]:
    """Those of all pages that people write; the reference is generated, and the changelog names options alone."""
    return [
        command
        for page in pages.sources()
        if "reference" not in page.parts and page.name != "CHANGELOG.md"
        for number, line, block in _lines(page)
        for command in _commands(line, page.relative_to(ROOT), number, block)
    ]


def _lines(page: Path) -> Iterator[tuple[int, str, bool]]:
    """Lines of code blocks, fenced as a shell's or indented, with those that go on joined; and code in sentences."""
    fence, going_on = None, ""
    variables: dict[str, str] = {}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if match := re.match(r"```(\w*)$", line):
            fence = None if fence is not None else match[1]
        elif fence in ("sh", "bash", "console") or (fence is None and line.startswith("    ")):
            going_on += line.strip().removesuffix("\\") + " "
            if line.endswith("\\"):
                continue
            typed, going_on = going_on.strip().removeprefix("$ "), ""
            if set_ := re.fullmatch(r'(\w+)="(.*)"', typed):
                variables[set_[1]] = set_[2]
            for name, value in variables.items():
                typed = typed.replace(f"${name}", value)
            yield number, typed, True
        elif fence is None:
            # A name alone (`onecopy train`) is no command to type.
            yield from ((number, code, False) for code in re.findall(r"`([^`]+)`", line) if len(code.split()) > 2)


def _commands(line: str, page: Path, number: int, block: bool) -> Iterator[Command]:
    before = re.match(r"(?:\w+=\S+ +)*", line)
    assert before is not None
    rest = line[before.end() :]
    if not rest.startswith(_STARTS):
        return
    environment = tuple((name, value) for name, _, value in (one.partition("=") for one in before[0].split()))
    words: list[str] = []
    for word in [*shlex.split(rest, comments=True), ";"]:
        if word not in _SHELL:
            words.append(word)
        elif words:
            output = ""
            if ">" in words:
                at = words.index(">")
                output, words = words[at + 1], words[:at] + words[at + 2 :]
            yield Command(tuple(words), environment, output, page, number, block)
            words = []
