"""The kernel as witness: bytes that leave each rank's network interface. Oracle: design.md's table, and the ledger.

The same measurement as benchmarks/wire.py, on a smaller model. It needs root, for network namespaces.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The benchmark is the thing under test, and is no part of the package.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import wire
from gpt import Shape

PSI = wire.count_parameters(Shape := Shape(layers=2, hidden=256, heads=4, vocabulary=512))
