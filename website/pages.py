"""Pages: the repository's Markdown, gathered into one folder for the site, with links that lead from page to page.

A page of the repository links to files of the repository. On the site the README is the first page, an example is a
page that shows it, and any other file that a page links to is copied beside the pages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

ROOT: Final = Path(__file__).parents[1]
_TOP: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK: Final = re.compile(r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?P<target>[^)\s"]+)(?P<after>[)"])')
_FENCE: Final = re.compile(r"^\s*(```|~~~)")


def sources() -> dict[Path, str]:
    """Each page of the repository that the site has, and its place on the site."""
    found = {ROOT / name: place for name, place in _TOP.items()}
    found |= {page: page.relative_to(ROOT / "docs").as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))}
    return found


def examples() -> list[Path]:
    """The programs that the site shows."""
    return sorted((ROOT / "examples").glob("*.py"))


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and targets of the links to files that stand outside of code blocks."""
    for number, line in _prose(page.read_text(encoding="utf-8")):
        for match in _LINK.finditer(line):
            if _is_file(match["target"]):
                yield number, match["target"]


def gather(out: Path) -> None:
    """Write all pages into ``out``, which is made anew.

    Raises:
        FileNotFoundError: if a page links to a file that is not there. It names the page, the line and the link.
    """
    shutil.rmtree(out, ignore_errors=True)
    places = {source: Path(place) for source, place in sources().items()}
    places |= {program: Path("examples", program.stem + ".md") for program in examples()}
    places[ROOT / "examples"] = Path("examples/index.md")
    for source, place in places.items():
        if source.suffix == ".md":
            _write(out / place, _moved(source, place, places, out))
    for program in examples():
        _write(out / places[program], _shown(program))
    _write(out / "examples/index.md", _list_of_examples())
    shutil.copytree(ROOT / "docs/images", out / "images", dirs_exist_ok=True)
    shutil.copy(Path(__file__).parent / "website.css", out)


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of fenced code."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def _is_file(target: str) -> bool:
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc and bool(parts.path)


def _moved(source: Path, place: Path, places: dict[Path, Path], out: Path) -> str:
    """The page's text with its links as they are on the site."""
    lines = source.read_text(encoding="utf-8").splitlines()
    for number, line in _prose("\n".join(lines)):

        def follow(match: re.Match[str], number: int = number) -> str:
            target = match["target"]
            if not _is_file(target):
                return match[0]
            file, mark, fragment = target.partition("#")
            leads_to = Path(os.path.normpath(source.parent / file))
            if not leads_to.exists() or not leads_to.is_relative_to(ROOT):
                raise FileNotFoundError(
                    f"{source.relative_to(ROOT)}:{number} links to {target!r}, which is not in the repository"
                )
            there = places.get(leads_to) or _copied(leads_to, out)
            return match["before"] + os.path.relpath(there, place.parent) + mark + fragment + match["after"]

        lines[number - 1] = _LINK.sub(follow, line)
    return "\n".join(lines) + "\n"


def _copied(file: Path, out: Path) -> Path:
    """The place on the site of a file that is no page: images keep theirs, others lie in files/."""
    if file.is_relative_to(ROOT / "docs"):
        return file.relative_to(ROOT / "docs")
    place = Path("files") / file.relative_to(ROOT)
    (out / place).parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        shutil.copytree(file, out / place, dirs_exist_ok=True)
    else:
        shutil.copy(file, out / place)
    return place


def _shown(program: Path) -> str:
    code = program.read_text(encoding="utf-8")
    summary, _, rest = (ast.get_docstring(ast.parse(code)) or program.stem).partition("\n")
    return f"# {program.name}\n\n{summary}\n\n{rest.strip()}\n\n```python\n{code}```\n"


def _list_of_examples() -> str:
    rows = ["# Examples", "", "Complete programs for two CPU ranks. The tests run each of them.", ""]
    for program in examples():
        summary = (ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        rows.append(f"- [{program.name}]({program.stem}.md): {summary}")
    return "\n".join(rows) + "\n"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
