"""Errors to expect: how far plans were from runs that others published, for the kind of model and GPU at hand.

The figures are those that `benchmarks/calibrate_planner.py` prints; tests hold them to it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from onecopy.planner.machine.machine import GPUS, Machine
from onecopy.planner.model.shape import Shape

TIME: Final = {"h100": 0.18, "a100": 0.16, "a100-40": 0.16}
"""Share of the step time within which nine of ten runs were, by kind of GPU: FSDP, MPT of 125M to 70B (llm-foundry)."""

MEMORY: Final = 0.14
"""Share of the memory within which nine of ten were: Llama of 1B and 3B at stages 0 and 1 on H100 (nanotron), with the
planner's own figures, none of which was fitted on them."""

FIT: Final = {"h100": (70, 70), "a100": (61, 61), "a100-40": (77, 78)}
"""Of so many of llm-foundry's runs, all of which ran, how many are said to fit."""


class Errors(NamedTuple):
    """Shares within which nine runs in ten are; None where no runs were compared."""

    time: float | None
    memory: float | None


def errors(machine: Machine, shape: Shape) -> Errors:
    """What to expect of this kind of model on this kind of GPU."""
    if shape.transformer is None:
        return Errors(None, None)
    return Errors(TIME.get(_kind(machine) or ""), MEMORY)


def share(error: float | None) -> str:
    """In words, to stand behind a number."""
    return "" if error is None else f" ±{error:.0%}"


def _kind(machine: Machine) -> str | None:
    return next((key for key in TIME if GPUS[key].name == machine.gpu.name), None)


def expected(machine: Machine, shape: Shape) -> str:
    """The errors to expect of time and memory, or that nothing was compared, in one line."""
    kind = _kind(machine)
    if shape.transformer is None:
        return "errors: no run of a model that is no transformer was compared"
    memory = f"memory of nine runs in ten is within {MEMORY:.0%}"
    if kind is None:
        return (
            f"errors: {memory}; no run on this kind of GPU was compared, on H100 and A100 step times are within "
            f"{max(TIME.values()):.0%}"
        )
    fit, ran = FIT[kind]
    return (
        f"errors: {memory}, step times on this kind of GPU within {TIME[kind]:.0%}; of {ran} that ran, {fit} are said "
        f"to fit"
    )
