"""Imports between rooms run one way. Oracle: the table below, which CONTRIBUTING.md explains."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from places import ROOT

SOURCE = ROOT / "src" / "onecopy"

ORDER = (
    "errors",
    "stage",
    "untrusted",
    "version",
    "loss",
    "observe",
    "memory",
    "comm",
    "activations",
    "sharding.graph",
    "sharding.tensor",
    "sharding.bucket",
    "sharding.model",
    "sharding.engine",
    "sharding.setup",
    "checkpoint",
    "resilience",
    "planner.quantities",
    "planner.available",
    "planner.formulas",
    "planner.machine",
    "planner.model",
    "planner.engine",
    "planner.answer",
    "integrations",
    "compat",
    "report",
    "recipes",
    "tuner",
    "cli",
)
"""Rooms from the ground up: each may import from those before it, and from itself."""

PURE = (
    "planner.formulas",
    "planner.quantities",
    "stage",
    "errors",
    "sharding.bucket.layout",
    "sharding.bucket.owners",
    "sharding.tensor.boxes",
)
"""What imports no torch."""

EMPTY = {"", "sharding", "planner"}
"""Packages that hold rooms and nothing else; the first is the package's face."""


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def _room(module: str) -> str:
    rooms = [room for room in ORDER if module == room or module.startswith(f"{room}.")]
    assert rooms, f"{module} is in no room of ORDER"
    return rooms[0]


def _statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports that are ever run; those for the type checker alone are not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from _statements(node)


@cache
def _imports(module: str) -> frozenset[str]:
    """What a module imports, by its dotted names."""
    found = set()
    for node in _statements(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{module} imports by a relative name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _ours(module: str) -> set[str]:
    """The modules of onecopy among them."""
    names = {
        name.removeprefix("onecopy").removeprefix(".") for name in _imports(module) if name.split(".")[0] == "onecopy"
    }
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("module", [module for module in MODULES if module not in EMPTY])
def test_a_module_imports_from_rooms_below_its_own(module: str) -> None:
    place = ORDER.index(_room(module))
    above = {other for other in _ours(module) - EMPTY if ORDER.index(_room(other)) > place}
    assert not above, f"{module} imports upwards: {sorted(above)}"
    assert "" not in _ours(module) or _room(module) in {"recipes", "planner.engine", "planner.answer", "tuner", "cli"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: _ours(module) - {module} - EMPTY for module in MODULES if module not in EMPTY}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_no_torch(room: str) -> None:
    inside = [module for module in MODULES if module == room or module.startswith(f"{room}.")]
    assert inside
    assert not [module for module in inside if any(name.split(".")[0] == "torch" for name in _imports(module))]


def test_every_room_says_what_it_is() -> None:
    for module, path in MODULES.items():
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{module} does not begin with what it is"
