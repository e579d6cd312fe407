"""Errors to expect: how far plans were from runs that others published, for the kind of model and GPU at hand.

The figures are those that `benchmarks/calibrate_planner.py` prints; a test holds them to it.
"""

from __future__ import annotations

from typing import Final

from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.shape import Shape

TIME: Final = {"h100": 0.21, "a100": 0.16, "a100-40": 0.16}
"""Share of the step time within which nine of ten runs were, by kind of GPU: FSDP, MPT of 125M to 70B (llm-foundry)."""

FIT: Final = {"h100": (66, 70), "a100": (60, 61), "a100-40": (64, 78)}
"""Of so many of these runs, all of which ran, how many are said to fit."""


def expected(machine: Machine, shape: Shape) -> str:
    """The error to expect of time and memory, or that nothing was compared, in one line."""
    kind = next((key for key in TIME if GPUS[key].name == machine.gpu.name), None)
    if shape.transformer is None:
        return "errors: no run of a model that is no transformer was compared"
    if kind is None:
        return (
            f"errors: no run on this kind of GPU was compared; on H100 and A100 step times of nine runs in ten are "
            f"within {max(TIME.values()):.0%}"
        )
    fit, ran = FIT[kind]
    return (
        f"errors: step times of nine runs in ten on this kind of GPU are within {TIME[kind]:.0%}; of {ran} that ran, "
        f"{fit} are said to fit"
    )
