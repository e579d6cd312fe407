"""`import onecopy` costs what `import torch` costs. Oracle: sys.modules of a process that imports torch alone."""

from __future__ import annotations

import json
import subprocess
import sys


def _imported(statements: str) -> set[str]:
    """Top-level modules of a new process after ``statements``."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def _modules(statements: str) -> set[str]:
    code = f"import json, sys\n{statements}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


USE = "import torch, onecopy; model = onecopy.shard(torch.nn.Linear(2, 2), 3); model(torch.ones(1, 2)).sum().backward()"


def test_importing_onecopy_loads_no_package_but_torchs_own() -> None:
    extra = _imported("import onecopy, torch") - _imported("import torch")
    assert extra == {"onecopy"}


def test_using_the_core_loads_no_package_but_torchs_own() -> None:
    """Sharding and a backward, in a plain process without a group."""
    plain = "import torch, torch.distributed.device_mesh; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()"
    extra = _imported(USE) - _imported(plain)
    assert not {"transformers", "rich", "pydantic", "typer", "tokenizers", "pyarrow", "tensorboard"} & _imported(USE)
    assert extra == {"onecopy"}


def test_the_core_loads_none_of_the_layers_above_it() -> None:
    """Imports run downwards only: cli → recipes → … → sharding → (memory, comm) → stage."""
    loaded = {name for name in _modules(USE) if name.startswith("onecopy.")}
    above = ("cli", "recipes", "planner", "tuner", "resilience", "checkpoint", "integrations", "report")
    assert not [name for name in loaded if name.split(".")[1] in above]
    assert "onecopy.sharding.engine" in loaded


def test_importing_onecopy_starts_no_thread_and_touches_no_torch_setting() -> None:
    code = (
        "import torch, threading, os\n"
        "before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())\n"
        "import onecopy\n"
        "assert all(getattr(onecopy, name) for name in onecopy.__all__)\n"
        "assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())\n"
        "assert threading.active_count() == 1 and not torch.distributed.is_initialized()\n"
        "print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr
