"""torch.distributed.checkpoint.state_dict with full_state_dict=True. Oracle: the same calls on the whole-batch twin."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from oracle import assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import every_stage

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _trained(rank: int, num_ranks: int, stage: int | None) -> tuple[nn.Module, AdamW]:
    model = seeded(TinyGPT)
    if stage is not None:
        onecopy.shard(model, stage)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, [part(b, rank, num_ranks) for b in token_batches(2)])
    return model, optimizer


def _assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor, where
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}")


@every_stage
@one_fork
def test_full_state_dicts_are_whole(stage: int, num_ranks: int) -> Forked:
    """Plain tensors on every rank, tied names among them; with cpu_offload on the first alone. Training goes on."""

    def run(rank: int) -> None:
        model, optimizer = _trained(rank, num_ranks, stage)
        twin, other = _trained(0, 1, None)
        weights, states = twin.state_dict(), get_optimizer_state_dict(twin, other)["state"]
        _assert_same(get_model_state_dict(model, options=FULL), weights)
        _assert_same(get_optimizer_state_dict(model, optimizer, options=FULL)["state"], states)
        both = get_state_dict(model, optimizer, options=ON_FIRST)
        if rank == 0:
            _assert_same(both[0], weights)
            _assert_same(both[1]["state"], states)
        else:
            assert both == ({}, {})
        assert all(isinstance(v, onecopy.SlicedTensor) for v in get_model_state_dict(model).values())
        assert all(isinstance(s["exp_avg"], onecopy.SlicedTensor) for s in optimizer.state.values())
        for m, o, size, place in ((model, optimizer, num_ranks, rank), (twin, other, 1, 0)):
            train(m, o, [part(b, place, size) for b in token_batches(3)[2:]])
        assert_same_weights(gathered_weights(model), whole_weights(twin), atol=1e-5)

    yield On(num_ranks, run)


@every_stage
@pytest.mark.parametrize("options", [FULL, FROM_FIRST], ids=["everywhere", "from the first rank"])
@pytest.mark.parametrize("meta", [False, True], ids=["", "meta"])
@one_fork
def test_full_state_dicts_go_into_a_sharded_model(
    meta: bool, options: StateDictOptions, stage: int, num_ranks: int
) -> Forked:
    """Also one that has no memory yet, and the optimizer's; what is trained after it is the twin's."""

    def run(rank: int) -> None:
        twin, other = _trained(0, 1, None)
        # Copies, for torch's functions hand out and take in the very tensors that the twin trains on.
        weights, states = copy.deepcopy((dict(twin.state_dict()), get_optimizer_state_dict(twin, other)))
        if options is FROM_FIRST and rank:
            weights, states = {}, {}
        with torch.device("meta" if meta else "cpu"):
            model = TinyGPT()
        onecopy.shard(model, stage)
        set_model_state_dict(model, weights, options=options)
        assert_same_weights(gathered_weights(model), whole_weights(twin), atol=0)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        set_optimizer_state_dict(model, optimizer, states, options=options)
        train(twin, other, token_batches(4)[2:])
        train(model, optimizer, [part(b, rank, num_ranks) for b in token_batches(4)[2:]])
        assert_same_weights(gathered_weights(model), whole_weights(twin), atol=1e-5)

    yield On(num_ranks, run)


@one_fork
def test_a_buffer_that_is_in_no_state_dict_is_not_left_without_values() -> Forked:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("scale", torch.ones(2), persistent=False)

    def run(rank: int) -> None:
        with torch.device("meta"):
            model = Scaled()
        onecopy.shard(model, 3)
        with pytest.raises(UsageError, match=r"'scale'.*onecopy\.materialize"):
            set_model_state_dict(model, dict(Scaled().state_dict()), options=FULL)

    yield On(2, run)
