"""`import onecopy` costs what `import torch` costs. Oracle: sys.modules of one new process, step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys, threading
seen = {}

def look(at):
    seen[at] = sorted(sys.modules)

def torch_is():
    settings = torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()
    return settings, torch.distributed.is_initialized(), threading.active_count()

def step(model):
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()

import torch
look("torch")
before = torch_is()
import onecopy
look("onecopy")
seen["torch is"] = [before, torch_is()]
# torch.compiler.disable loads torch's compiler.
torch.compiler.disable(print)
step(torch.nn.Linear(2, 2))
look("a step of torch")
step(onecopy.shard(torch.nn.Linear(2, 2), 3))
look("a step of onecopy")
before = torch_is()
assert all(getattr(onecopy, name) for name in onecopy.__all__)
seen["torch is"] += [before, torch_is()]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _packages(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_onecopy_loads_no_package_but_torchs_own(seen: dict[str, Any]) -> None:
    assert _packages(seen["onecopy"]) - _packages(seen["torch"]) == {"onecopy"}


def test_using_the_core_loads_no_package_but_torchs_own_and_no_layer_above(seen: dict[str, Any]) -> None:
    """One step of a plain model, and then one of a sharded one.

    Imports run downwards only: cli → recipes → … → sharding → (memory, comm) → stage.
    """
    assert _packages(seen["a step of onecopy"]) - _packages(seen["a step of torch"]) == set()
    ours = {name.split(".")[1] for name in seen["a step of onecopy"] if name.startswith("onecopy.")}
    assert "sharding" in ours
    assert not ours & {"cli", "recipes", "planner", "tuner", "resilience", "checkpoint", "integrations", "report"}


def test_importing_onecopy_starts_no_thread_and_touches_no_torch_setting(seen: dict[str, Any]) -> None:
    """Nor does the first use of each of its names, which loads what that is in."""
    before, imported, stepped, named = seen["torch is"]
    assert before == imported
    assert stepped == named
    assert before[1:] == named[1:] == [False, 1]
