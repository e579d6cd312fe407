"""onecopy.ema: moving averages in slices. Oracle: the recipe by hand on the whole-batch twin, and torch's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onecopy
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import SettingsError, UsageError
from oracle import assert_same_weights, gathered_weights, mean_over_ranks, part, train, whole_weights
from ranks import every_stage


def _averaged_twin(steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Trained, and its average by the formula."""
    twin = seeded(Stack)
    averages = whole_weights(twin)
    optimizer = AdamW(twin.parameters(), lr=1e-2)
    for batch in vector_batches(steps):
        train(twin, optimizer, [batch])
        for name, weight in twin.named_parameters():
            averages[name] = 0.8 * averages[name] + 0.2 * weight.detach()
    return twin, averages


@every_stage
@one_fork
def test_the_average_is_the_twins_and_evaluation_uses_it(stage: int, num_ranks: int) -> Forked:
    """Loss under the average, in the middle of training too; afterwards the parameters are bit for bit as before."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        average = onecopy.ema(model, 0.8)
        for batch in vector_batches(3):
            train(model, optimizer, [part(batch, rank, num_ranks)])
            average.update()
            with average.applied(), torch.no_grad():
                model(*part(batch, rank, num_ranks))
        twin, expected = _averaged_twin(3)
        before = gathered_weights(model)
        held = sum(
            value.local.numel() for value in average.averages.values() if isinstance(value, onecopy.SlicedTensor)
        )
        assert held == sum(p.local.numel() for p in model.parameters() if isinstance(p, onecopy.SlicedTensor))
        test = vector_batches(4)[3]
        with average.applied() as shown, torch.no_grad():
            assert shown is model
            assert_same_weights(gathered_weights(model), expected)
            losses = mean_over_ranks([model(*part(test, rank, num_ranks)).item()])
        assert_same_weights(gathered_weights(model), before, atol=0)
        assert_same_weights(before, whole_weights(twin))
        twin.load_state_dict(expected)
        assert losses == pytest.approx([twin(*test).item()], rel=1e-5)

    yield On(num_ranks, run)


def test_bf16_parameters_are_averaged_in_fp32() -> None:
    """A step too small for bf16 moves the average all the same. By hand."""
    model = onecopy.shard(nn.Linear(3, 2, dtype=torch.bfloat16), 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = onecopy.ema(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(2):
        average.update()
    assert average.averages["weight"].dtype == torch.float32
    assert average.averages["weight"].mean().item() == pytest.approx(1 + 0.001 + 0.999 * 0.001, abs=1e-6)


def test_a_plain_model_has_torchs_average_and_decay_may_be_a_function() -> None:
    """Oracle: AveragedModel, whose first update copies, as a decay of 0 does."""
    model = seeded(Stack)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = onecopy.ema(model, lambda updates: 0.9 if updates else 0.0)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for batch in vector_batches(3):
        train(model, optimizer, [batch])
        average.update()
        expected.update_parameters(model)
    with average.applied():
        assert_same_weights(whole_weights(model), whole_weights(expected.module))


@every_stage
@one_fork
def test_an_average_is_saved_and_goes_on(stage: int, num_ranks: int, tmp_path: Path) -> Forked:
    """By torch.distributed.checkpoint, loaded whole at another number of ranks, and in memory."""

    def save(rank: int) -> dict[str, Tensor]:
        model = onecopy.shard(seeded(Stack), stage)
        average = onecopy.ema(model, 0.8)
        train(model, AdamW(model.parameters(), lr=1e-2), [part(vector_batches(1)[0], rank, num_ranks)])
        average.update()
        dcp.save({"ema": average.state_dict()}, checkpoint_id=tmp_path / "c")
        with average.applied():
            return gathered_weights(model)

    def load(rank: int) -> None:
        other = onecopy.ema(onecopy.shard(seeded(Stack), 3), 0.8)
        state = {"ema": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "c")
        other.load_state_dict(state["ema"])
        assert other.updates == 1
        with other.applied():
            assert_same_weights(gathered_weights(other.model), expected, atol=0)

    expected = (yield On(num_ranks, save))[0]
    yield On(2, load)


@one_fork
def test_what_is_refused_names_the_way() -> Forked:
    """torch's AveragedModel and the deepcopy idiom, made after shard and before it."""

    def run(rank: int) -> None:
        before = AveragedModel(seeded(Stack))
        model = onecopy.shard(seeded(Stack), 3)
        for copies in (lambda: AveragedModel(model), lambda: copy.deepcopy(model)):
            with pytest.raises(UsageError, match=r"onecopy\.ema\(model, decay\)"):
                copies()
        with pytest.raises(UsageError, match=r"onecopy\.ema"):
            before.update_parameters(model)
        late = AveragedModel(seeded(Stack), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        late.n_averaged += 1
        with pytest.raises(UsageError, match=r"onecopy\.ema"):
            late.update_parameters(model)
        average = onecopy.ema(model, 0.9)
        with pytest.raises(UsageError, match="train outside"), average.applied():
            train(model, AdamW(model.parameters()), [part(vector_batches(1)[0], rank, 2)])
        assert_same_weights(gathered_weights(model), whole_weights(seeded(Stack)), atol=0)
        with pytest.raises(UsageError, match="other names"):
            average.load_state_dict({"updates": 1, "averages": {"x": torch.ones(1)}})
        with pytest.raises(SettingsError, match=r"between 0 and 1; found 1\.5"):
            onecopy.ema(model, 1.5)

    yield On(2, run)
