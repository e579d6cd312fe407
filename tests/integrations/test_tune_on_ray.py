"""The tuner with the ranks that Ray Train gave. Oracles: the number of workers; the space that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from places import ROOT

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'integrations': ray is not installed")


def test_workers_of_ray_tune_with_the_ranks_that_they_are(tmp_path: Path) -> None:
    support = ROOT / "tests" / "support"
    ended = subprocess.run(
        [sys.executable, str(support / "tune_on_ray.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    # A setting that is much slower than the best is not measured to its end.
    assert said in ([{"kinds": ["measured", kind], "ranks": 2, "group": 2}] * 2 for kind in ("measured", "slow"))
