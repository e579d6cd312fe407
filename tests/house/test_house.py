"""`import onecopy` costs what `import torch` costs. Oracle: sys.modules of a process that imports torch alone."""

from __future__ import annotations

import json
import subprocess
import sys


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _modules(statements: str) -> set[str]:
    """Modules of a new process after ``statements``."""
    return set(json.loads(_run(f"import json, sys\n{statements}\nprint(json.dumps(sorted(sys.modules)))")))


def _packages(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_onecopy_loads_no_package_but_torchs_own() -> None:
    assert _packages(_modules("import torch, onecopy")) - _packages(_modules("import torch")) == {"onecopy"}


def test_using_the_core_loads_no_package_but_torchs_own_and_no_layer_above() -> None:
    """One step in a plain process; beside one of torch that says torch.compiler.disable, which loads its compiler.

    Imports run downwards only: cli → recipes → … → sharding → (memory, comm) → stage.
    """
    step = "model(torch.ones(1, 2)).sum().backward(); torch.optim.AdamW(model.parameters()).step()"
    plain = _modules(f"import torch; torch.compiler.disable(print); model = torch.nn.Linear(2, 2); {step}")
    used = _modules(f"import torch, onecopy; model = onecopy.shard(torch.nn.Linear(2, 2), 3); {step}")
    assert _packages(used) - _packages(plain) == {"onecopy"}
    ours = {name.split(".")[1] for name in used if name.startswith("onecopy.")}
    assert "sharding" in ours
    assert not ours & {"cli", "recipes", "planner", "tuner", "resilience", "checkpoint", "integrations", "report"}


def test_importing_onecopy_starts_no_thread_and_touches_no_torch_setting() -> None:
    settings = "(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())"
    code = (
        "import threading, torch\n"
        f"before = {settings}\n"
        "import onecopy\n"
        "assert all(getattr(onecopy, name) for name in onecopy.__all__)\n"
        f"assert before == {settings}\n"
        "assert not torch.distributed.is_initialized()\n"
        "print(threading.active_count())"
    )
    assert _run(code) == "1"
