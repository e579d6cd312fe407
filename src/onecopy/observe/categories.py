"""What memory is counted by. The meter and the planner, which imports no torch, speak of the same categories."""

from __future__ import annotations

from typing import Final

CATEGORIES: Final = (
    "parameters_sliced",
    "parameters_gathered",
    "gradients_whole",
    "gradients_sliced",
    "optimizer",
    "activations",
    "checkpoints",
    "communication",
    "mirror",
)
