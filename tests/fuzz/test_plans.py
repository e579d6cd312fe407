"""Ranks whose data leads them through different blocks train like one process, over memory and over sockets.

The plans are random (`plans.py`): which rank visits which block, in which order, how often, what is evaluated between,
whose forward or backward raises an error. `python tests/fuzz/plans.py --plans 1000` runs many more.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import onecopy
from models import seeded, vector_batches
from oracle import assert_same_weights, gathered_weights, part, whole_weights
from plans import run_plans
from ranks import run_ranks

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "sockets"])


@TRANSPORTS
@pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 4), (2, 2), (3, 2), (3, 4), (1, 3), (2, 3), (3, 3)])
def test_random_plans_train_like_one_process(stage: int, num_ranks: int, transport: str) -> None:
    """Sixteen runs of three plans each."""
    first = 100 * num_ranks + 10 * stage + (transport == "memory")
    run_plans(list(range(first, first + 3)), num_ranks, stage, transport)


def _step(*models: nn.Module) -> None:
    for model in models:
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


class HeadAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(10, 10)])
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor, through: bool) -> Tensor:
        return F.mse_loss(self.head(self.blocks[0](x) if through else x), y)


@TRANSPORTS
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_skips_what_the_other_uses(stage: int, odd: int, transport: str) -> None:
    """Layer drop, early exit, a tower or an expert that one rank's data does not reach: as in one process."""

    def run(rank: int) -> None:
        twin = seeded(HeadAlone)
        model = onecopy.shard(seeded(HeadAlone), stage)
        for batch in vector_batches(2):
            for other in range(2):
                (twin(*part(batch, other, 2), other != odd) / 2).backward()
            model(*part(batch, rank, 2), rank != odd).backward()
            _step(twin, model)
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    run_ranks(2, run, group_timeout=10, transport=transport)


@TRANSPORTS
def test_ranks_deviate_after_a_pass_that_all_shared(transport: str) -> None:
    """First all blocks on both ranks; then rank 0 the last one only, and rank 1 the second: as in one process."""
    routes = [[[0, 1, 2], [0, 1, 2]], [[2], [1]], [[0], [2, 1]]]

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
            self.head = nn.Linear(10, 3)

        def forward(self, x: Tensor, y: Tensor, route: list[int]) -> Tensor:
            for block in route:
                x = x + torch.tanh(self.blocks[block](x))
            return F.mse_loss(self.head(x), y)

    def run(rank: int) -> None:
        twin = seeded(Routed)
        model = onecopy.shard(seeded(Routed), 3)
        for batch, route in zip(vector_batches(3), routes, strict=True):
            for other in range(2):
                (twin(*part(batch, other, 2), route[other]) / 2).backward()
            model(*part(batch, rank, 2), route[rank]).backward()
            _step(twin, model)
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    run_ranks(2, run, group_timeout=10, transport=transport)


@TRANSPORTS
@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_samples_alone_while_the_others_wait_elsewhere(stage: int, transport: str) -> None:
    """``if rank == 0: model(...)`` needs nothing of ranks that stand in a barrier of the user's."""

    def run(rank: int) -> None:
        twin = seeded(HeadAlone)
        model = onecopy.shard(seeded(HeadAlone), stage)
        batch = vector_batches(1)[0]
        if rank == 0:
            with torch.no_grad():
                for through in (True, False, True):
                    expected = twin(*batch, through)
                    torch.testing.assert_close(model(*batch, through), expected)
        torch.distributed.barrier()
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    run_ranks(3, run, group_timeout=10, transport=transport)
