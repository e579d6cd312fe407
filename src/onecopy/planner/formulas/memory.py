"""Memory: bytes of model states that a rank holds, by ZeRO §3.1 and §5 (arXiv 1910.02054).

Mixed precision with Adam keeps 2 bytes a parameter for the parameter, 2 for its gradient and K = 12 for the optimizer
(fp32 master, momentum, variance). What a stage shards is divided by N. Activations, buffers and the whole parameters of
the unit that computes come on top: what fits is less than these formulas allow (ZeRO Table 2: 62 to 82 % of it).
"""

from __future__ import annotations

from typing import NamedTuple

from onecopy.stage import Stage


class StateBytes(NamedTuple):
    """Bytes that one rank holds, by model state."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    stage: int,
    parameters: float,
    shard: int,
    *,
    model_parallel: int = 1,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> StateBytes:
    """Bytes of model states on one rank.

    Args:
        stage: 0, 1, 2 or 3.
        parameters: Ψ, of the whole model.
        shard: N, ranks that share one copy of what is sharded.
        model_parallel: M, ranks over which the model itself is cut.
        parameter_bytes: of one parameter in the compute dtype.
        gradient_bytes: of one gradient.
        optimizer_bytes: K, what the optimizer keeps for one parameter, fp32 master included.

    Raises:
        SettingsError: if there is no such stage.
    """
    kind = Stage.of(stage)
    held = parameters / model_parallel
    return StateBytes(
        parameters=parameter_bytes * held / (shard if kind.shards_parameters else 1),
        gradients=gradient_bytes * held / (shard if kind.shards_gradients else 1),
        optimizer=optimizer_bytes * held / (shard if kind.shards_optimizer else 1),
    )


def largest_model(stage: int, memory: float, shard: int, *, model_parallel: int = 1) -> float:
    """Parameters of the largest model whose states alone fill a rank's ``memory`` (bytes): ZeRO Table 2's bound.

    Raises:
        SettingsError: if there is no such stage.
    """
    return memory / model_state_bytes(stage, 1.0, shard, model_parallel=model_parallel).total
