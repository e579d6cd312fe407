"""Available: which of the planner's options onecopy can run today. The one place to change when a feature arrives."""

from __future__ import annotations

from typing import Final

READY: Final[frozenset[str]] = frozenset(
    {
        "units+cpu",
        "P_a",
        "P_a+cpu",
        "tensor parallelism",
        "optimizer on cpu",
        "optimizer on nvme",
        "parameters on cpu",
        "parameters on nvme",
        "copies",
    }
)
"""Of the features in `WORDS`, those that onecopy has."""

WORDS: Final = {
    "units+cpu": "activation checkpoints on the host",
    "P_a": "partitioned activation checkpoints",
    "P_a+cpu": "partitioned activation checkpoints on the host",
    "tensor parallelism": "tensor parallelism",
    "optimizer on cpu": "the optimizer on the CPU",
    "optimizer on nvme": "optimizer states on NVMe",
    "parameters on cpu": "parameters and optimizer on the CPU",
    "parameters on nvme": "parameters and optimizer on NVMe",
    "copies": "copies of slices that survive a failure",
}
"""Features that an option may need, in words."""


def missing(features: list[str]) -> tuple[str, ...]:
    """Those of ``features`` that onecopy does not have yet, in words."""
    return tuple(WORDS[feature] for feature in features if feature not in READY)
