"""The reference has every public name, command and key, as the source has them. Oracle: the source, imported."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import names
import onecopy
import reference
from onecopy import errors
from onecopy.cli.main import make_app
from onecopy.observe.categories import CATEGORIES
from onecopy.recipes.account import Summary
from onecopy.recipes.settings import keys
from places import ROOT

FOLDER = ROOT / "docs/reference"
NAMES = names.public_names()


def _public(name: str) -> Any:
    found: Any = onecopy
    for part in name.split("."):
        found = getattr(found, part)
    return found


FUNCTIONS = [name for name in NAMES if inspect.isroutine(_public(name))]
DATACLASSES = [name for name in NAMES if dataclasses.is_dataclass(_public(name))]

RAISES_NOTHING = {"needs_whole"}


@pytest.mark.parametrize("page", reference.pages())
def test_pages_are_as_the_source_has_them(page: str) -> None:
    assert (FOLDER / page).read_text(encoding="utf-8") == reference.pages()[page], "run python website/reference.py"


def test_every_public_name_has_an_entry() -> None:
    text = (FOLDER / "onecopy.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### (?:class )?`onecopy\.([\w.]+)`$", text, flags=re.MULTILINE)
    public = {name for name in onecopy.__all__ if not inspect.ismodule(getattr(onecopy, name))}
    assert sorted(entries) == sorted(public | {"activations.checkpoint"})


def test_every_public_name_has_its_place() -> None:
    placed = [name for group in names.GROUPS.values() for name in group]
    assert sorted(placed) == sorted(set(placed))
    assert set(placed) <= set(NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_docstring_names_each_argument_and_what_it_returns(name: str) -> None:
    function: Callable[..., Any] = _public(name)
    text = inspect.getdoc(function) or ""
    summary = text.partition("\n\n")[0]
    assert summary
    assert summary.endswith("."), summary
    told = set(re.findall(r"^    ([\w, ]+):", text, flags=re.MULTILINE))
    told = {one.strip() for these in told for one in these.split(",")} | set(re.findall(r"``(\w+)``", text))
    # What a function that takes one model and nothing else does with it stands in its summary.
    asked = {name for name in inspect.signature(function).parameters if name != "model"}
    assert asked <= told, sorted(asked - told)
    if inspect.signature(function).return_annotation not in ("None", None):
        assert re.search(r"^(Returns|Yields):", text, flags=re.MULTILINE), text
    assert name in RAISES_NOTHING or re.search(r"^Raises:", text, flags=re.MULTILINE), text


@pytest.mark.parametrize("name", DATACLASSES)
def test_a_dataclass_says_what_each_field_is(name: str) -> None:
    text = inspect.getdoc(_public(name)) or ""
    told = {one.strip() for these in re.findall(r"^    ([\w, ]+):", text, re.MULTILINE) for one in these.split(",")}
    missing = {field.name for field in dataclasses.fields(_public(name)) if not field.name.startswith("_")} - told
    assert not missing


def test_every_error_is_there() -> None:
    text = (FOLDER / "errors.md").read_text(encoding="utf-8")
    for name, kind in vars(errors).items():
        if inspect.isclass(kind):
            assert f"## {name}\n" in text
            assert kind.__doc__


def test_every_command_and_option_is_there() -> None:
    import typer

    text = (FOLDER / "command-line.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(make_app())
    for name, command in group.commands.items():
        _, _, section = text.partition(f"## onecopy {name}\n")
        section = section.partition("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.opts[0].startswith("--") else ():
                assert f"- `{option}" in section, f"onecopy {name} {option}"


def test_every_key_of_the_config_is_there_with_what_it_means() -> None:
    text = (FOLDER / "config.md").read_text(encoding="utf-8")
    for key in keys():
        _, _, section = text.partition(f"## {key.section}\n")
        row = re.search(rf"^\| `{key.name}` \| `.*` \| (.+) \|$", section.partition("\n## ")[0], flags=re.MULTILINE)
        assert row is not None, key.dotted
        assert len(row[1].split()) >= 2, key.dotted


def test_metrics_have_every_category() -> None:
    text = (FOLDER / "metrics.md").read_text(encoding="utf-8")
    for category in CATEGORIES:
        assert f"`memory/{category}`" in text
    for field in dataclasses.fields(Summary):
        assert f"| `{field.name}` |" in text
    assert "|  |" not in text
