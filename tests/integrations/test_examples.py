"""Every program in examples/ runs on two CPU ranks as its first lines say. Oracle: the loss that it prints falls."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from places import ROOT

pytest.importorskip("accelerate", reason="examples run with the extra 'integrations': accelerate is not installed")

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

LINES = 80
SECONDS = 110
"""A minute on two cores of its own; a machine that does other work besides takes up to twice that."""


def _packages(example: Path) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(example.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    return imported


@pytest.mark.timeout(130)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains(example: Path, tmp_path: Path) -> None:
    if missing := sorted(name for name in _packages(example) if find_spec(name) is None):
        pytest.skip(f"needs the extra 'integrations': {', '.join(missing)} is not installed")
    text = example.read_text()
    assert len(text.splitlines()) < LINES
    command = re.search(r"^    ((?:torchrun|python) .*)$", text, flags=re.MULTILINE)
    assert command is not None, "its first lines must say how it is run"
    program, *arguments = shlex.split(command[1])
    own = [sys.executable, "-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else [sys.executable]
    arguments = [str(ROOT / argument) if argument.startswith("examples/") else argument for argument in arguments]
    done = subprocess.run(
        [*own, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "ONECOPY_POISON": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"loss: ([\d.]+) -> ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    print(found[0])
    assert float(found[2]) < 0.95 * float(found[1])
