"""Watch: losses and gradients that are not finite numbers, found before the optimizer takes them into the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from onecopy.checkpoint.finite import first_not_finite
from onecopy.errors import NotFiniteError
from onecopy.recipes.report import plain_console
from onecopy.recipes.world import World


@dataclass(frozen=True)
class _Seen:
    """What one rank has: its own loss, and the first parameter whose part here, or its gradient's, is not finite."""

    loss: float
    weight: str | None
    gradient: str | None


class Watch:
    """Counts steps that are not finite, and says where it began.

    Args:
        most: steps in a row that end the run.

    Attributes:
        spoiled: how many steps in a row were not finite.
    """

    def __init__(self, model: nn.Module, world: World, most: int) -> None:
        self._model = model
        self._world = world
        self._most = most
        self._first = ""
        self.spoiled = 0

    def state_dict(self) -> dict[str, Any]:
        """What a rank that takes this one's place goes on with."""
        return {"spoiled": self.spoiled, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, here or on another rank."""
        self.spoiled, self._first = state["spoiled"], state["first"]

    def step_was_finite(self, step: int, loss: float, norm: float, *, everywhere: bool) -> bool:
        """Whether the optimizer may take the step. Every rank asks, and all get the same answer.

        Args:
            loss: this rank's own.
            norm: of the gradients of all ranks.
            everywhere: whether loss and norm are finite on every rank.
        """
        if everywhere:
            self.spoiled = 0
            return True
        self.spoiled += 1
        words = _describe(self._world.gather(self._look(loss)), [n for n, _ in self._model.named_parameters()], norm)
        if self.spoiled == 1:
            self._first = f"step {step}: {words}"
        if self._world.rank == 0:
            plain_console().print(f"step {step} changes nothing: {words}", soft_wrap=True, markup=False)
        return False

    def check(self) -> None:
        """Raise `NotFiniteError` on every rank if too many steps in a row were not finite."""
        if self.spoiled == self._most:
            raise NotFiniteError(
                f"{self.spoiled} step{'s' * (self.spoiled > 1)} in a row had a loss or gradients that were not "
                f"finite, and changed no weights. The first was {self._first}. Look at that step's data, lower "
                "optimizer.learning_rate, or resume from an earlier checkpoint; checkpoints saved before are "
                "untouched"
            )

    def _look(self, loss: float) -> _Seen:
        named = list(self._model.named_parameters())
        return _Seen(
            loss,
            first_not_finite(named),
            first_not_finite((name, p.grad) for name, p in named if p.grad is not None),
        )


def _describe(seen: list[_Seen], order: list[str], norm: float) -> str:
    """Where it begins: weights that were so before, then a rank's loss, then a gradient."""
    weights = {rank: one.weight for rank, one in enumerate(seen) if one.weight is not None}
    if weights:
        return f"the parameter {_first(weights, order)} holds nan or inf"
    losses = {rank: one.loss for rank, one in enumerate(seen) if not math.isfinite(one.loss)}
    gradients = {rank: one.gradient for rank, one in enumerate(seen) if one.gradient is not None}
    words = [f"the loss is {value} on rank {rank}" for rank, value in losses.items()]
    if len(words) == len(seen) > 1:
        words = [f"the loss is {losses[0]} on every rank"]
    if gradients:
        words.append(f"the first gradient that holds nan or inf is that of {_first(gradients, order)}")
    return "; ".join(words) or f"the norm of all gradients is {norm}"


def _first(found: dict[int, str], order: list[str]) -> str:
    rank = min(found, key=lambda rank: order.index(found[rank]))
    return f"{found[rank]!r} on rank {rank}"
