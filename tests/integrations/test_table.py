"""Every cell of docs/integrations.md's tables is a test. Oracle: the functions in the files that it names."""

from __future__ import annotations

import ast
import re

import pytest

from onecopy.errors import MissingPackageError
from onecopy.integrations.needs import needs
from places import ROOT

ROWS = re.findall(
    r"^\| (.+?) \| ([\d, ]+|-) \| `(\w+\.py)::(\w+)` \|$", (ROOT / "docs/integrations.md").read_text(), re.M
)


def test_the_tables_are_read() -> None:
    lines = [line for line in (ROOT / "docs/integrations.md").read_text().splitlines() if line.startswith("| ")]
    heads = [line for line in lines if line.startswith("| what | stages ")]
    assert len(ROWS) == len(lines) - len(heads) > 10


@pytest.mark.parametrize("what, stages, file, test", ROWS)
def test_a_cell_names_a_test(what: str, stages: str, file: str, test: str) -> None:
    (path,) = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, what


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'onecopy\[integrations\]'"):
        needs("onecopy.integrations.nothing", "surely_not_installed", "nor_this_one")
