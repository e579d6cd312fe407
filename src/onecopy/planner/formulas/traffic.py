"""Traffic: elements of model states that a rank sends in one step, by ZeRO §7 (arXiv 1910.02054).

An all-gather and a reduce-scatter of Ψ elements each cost Ψ(N - 1)/N sent by every rank, an all-reduce both together.
With g micro-batches in a step:

=====  ===========================================  =======
stage  collectives                                  total
=====  ===========================================  =======
0      1 all-reduce                                 2Ψ
1      1 all-gather, 1 reduce-scatter               2Ψ
2      1 all-gather, g reduce-scatters              (g + 1)Ψ
3      2g all-gathers, g reduce-scatters            3gΨ
=====  ===========================================  =======
"""

from __future__ import annotations

from typing import NamedTuple

from onecopy.stage import Stage


class StepElements(NamedTuple):
    """Elements that one rank sends in one step, by operation. To be multiplied by the bytes of an element."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float

    @property
    def total(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def step_elements(
    stage: int, parameters: float, shard: int, micro_batches: int = 1, replicate: int = 1, frozen: float = 0.0
) -> StepElements:
    """Elements of model states that one rank sends in one step.

    Hybrid sharding (``replicate`` > 1) adds an all-reduce of the rank's slice after each reduce-scatter (MiCS; FSDP
    §3.2.2). Stage 0 has nothing to shard: its one all-reduce runs over all ``shard * replicate`` ranks.

    Args:
        stage: 0, 1, 2 or 3.
        parameters: Ψ, or what a gather really moves when buckets are padded (`onecopy.padded_numel`).
        shard: N, ranks that share one copy of the model states.
        micro_batches: g, backward passes in a step.
        replicate: how many such copies there are.
        frozen: parameters on top that are not trained: stage 3 gathers them, elsewhere they stay as they are.

    Raises:
        SettingsError: if there is no such stage.
    """
    kind = Stage.of(stage)
    ranks = shard * replicate
    if not kind.shards_optimizer:
        return StepElements(0.0, 0.0, all_reduce=2 * parameters * (ranks - 1) / ranks)
    gathers = 2 * micro_batches if kind.shards_parameters else 1
    reduces = micro_batches if kind.shards_gradients else 1
    once = parameters * (shard - 1) / shard
    unchanged = frozen * (shard - 1) / shard if kind.shards_parameters else 0.0
    slice_once = 2 * (parameters / shard) * (replicate - 1) / replicate
    return StepElements(gathers * (once + unchanged), reduces * once, reduces * slice_once)
