"""`torch.distributed.checkpoint.async_save` of a sharded model. Oracle: what the state dict held when it was called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.errors import UsageError
from oracle import assert_same_weights, gathered_weights, part, train
from ranks import run_ranks


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_goes_on_while_a_checkpoint_is_written(stage: int, tmp_path: Path) -> None:
    """What is trained meanwhile is not in it; it loads at another stage and goes on as the run that was saved."""

    def run(rank: int) -> None:
        own = [part(batch, rank, 2) for batch in vector_batches(6)]
        model = onecopy.shard(seeded(Stack), stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, own[:3])
        weights, states = get_state_dict(model, optimizer)
        saved = gathered_weights(model)
        # The writer's messages must not meet those of training.
        group = dist.new_group(backend="gloo")
        writing = dcp.async_save({"model": weights, "optim": states}, checkpoint_id=tmp_path, process_group=group)
        train(model, optimizer, own[3:])
        writing.result(timeout=60)
        after = gathered_weights(model)

        again = onecopy.shard(seeded(Stack), 1 if stage == 3 else 3)
        second = torch.optim.AdamW(again.parameters(), lr=1e-2)
        weights, states = get_state_dict(again, second)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=tmp_path)
        set_state_dict(again, second, model_state_dict=weights, optim_state_dict=states)
        assert_same_weights(gathered_weights(again), saved, atol=0)
        train(again, second, own[3:])
        assert_same_weights(gathered_weights(again), after)

    run_ranks(2, run, timeout=120)


def test_states_on_disk_are_not_copied_for_it(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 3, offload=onecopy.Offload(tmp_path))
        with pytest.raises(UsageError, match=r"call torch\.distributed\.checkpoint\.save"):
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")

    run_ranks(2, run)
