"""DeepSpeed's checkpoints into ours. Oracles: what DeepSpeed gathered and trained itself, beside each checkpoint, and a
plain twin for the states, which it does not give out. `tests/support/fixtures/make_deepspeed.py` made them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.checkpoint.deepspeed import import_deepspeed
from onecopy.errors import CheckpointError
from oracle import assert_same_weights, gathered_weights, mean_over_ranks
from places import FIXTURES


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_deepspeed", FIXTURES / "make_deepspeed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = dict(os.environ)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)
    return module


MAKER = _maker()

DEFAULT_CLIP = 1.0
"""What DeepSpeed clips gradients to where its config says nothing."""


def _import(rank: int, source: Path, out: Path) -> Any:
    done = import_deepspeed(source, out)
    return done.step, done.stage, done.ranks, done.parameters


def _twin(rank: int) -> dict[str, dict[str, Tensor]]:
    """Adam's states after the two steps, in one process on whole batches."""
    torch.manual_seed(0)
    model = MAKER.Tied()
    optimizer = MAKER.make_optimizer(model)
    for batch in MAKER.batches(2):
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), DEFAULT_CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p.requires_grad}


def _states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Whole states of a sharded optimizer, put together by hand."""
    found = {}
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq"):
            if key in own:
                slicing, whole = own[key].slicing, torch.zeros(parameter.numel())
                whole[slicing.start : slicing.start + slicing.numel] = own[key].local
                torch.distributed.all_reduce(whole)
                found.setdefault(name, {})[key] = whole.view(parameter.shape)
        if own:
            found[name]["step"] = own["step"].clone()
    return found


@pytest.mark.parametrize("case", MAKER.CASES)
@one_fork
def test_weights_states_and_the_next_losses_are_deepspeeds(case: str, tmp_path: Path) -> Forked:
    """After bf16 training the fp32 masters are exact; states and losses of an fp32 run are other ones."""
    source, stage, exact = FIXTURES / f"deepspeed-{case}", int(case[5]), not case.endswith("bf16")
    step, found_stage, ranks, parameters = (yield On(1, _import, source, tmp_path, group=False))[0]
    assert (step, found_stage, ranks) == (2, stage, 2)
    assert parameters == sum(p.numel() for p in MAKER.Tied().parameters())
    expected = torch.load(source / "expected.pt", weights_only=True)

    def resume(rank: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
        torch.manual_seed(7)
        model = onecopy.shard(MAKER.Tied(), 3)
        optimizer = MAKER.make_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = 5.0
        assert onecopy.load(tmp_path, model, optimizer).step == 2
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 0.1), (3e-3, 0.0)]
        weights, states, losses = gathered_weights(model), _states(model, optimizer), []
        for batch in MAKER.batches(4)[2:]:
            loss = model(batch[rank : rank + 1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], DEFAULT_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return weights, states, mean_over_ranks(losses)

    twin = (yield On(1, _twin, group=False))[0]
    for weights, states, losses in (yield On(4, resume)):
        torch.manual_seed(0)
        frozen = MAKER.Tied().frozen.weight.detach()
        frozen = frozen if exact else frozen.bfloat16().float()
        assert_same_weights(weights, {**expected["weights"], "frozen.weight": frozen}, atol=0)
        assert states.keys() == twin.keys()
        for name, own in states.items():
            for key, value in own.items():
                rounding = {"rtol": 1e-5, "atol": 1e-8} if exact else {"rtol": 0.05, "atol": 2e-3}
                torch.testing.assert_close(value, twin[name][key], **rounding)
        assert losses == pytest.approx(expected["losses"], rel=1e-6 if exact else 1e-2, abs=0)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda tag: (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), "saved by 2 ranks"),
        (lambda tag: (tag / "mp_rank_00_model_states.pt").unlink(), "mp_rank_00_model_states.pt is missing"),
        (lambda tag: [path.unlink() for path in tag.glob("zero_*")], "only checkpoints of ZeRO stages"),
        (
            lambda tag: torch.save(Evil(), tag / "mp_rank_00_model_states.pt"),
            "posix.system, which could run code",
        ),
        (lambda tag: (tag / "mp_rank_00_model_states.pt").write_bytes(b"half"), "cannot be read"),
        (lambda tag: shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "layer_00.pt"), "does not read"),
    ],
)
@one_fork
def test_what_cannot_be_read_is_said(damage: Any, words: str, tmp_path: Path) -> Forked:
    source = shutil.copytree(FIXTURES / "deepspeed-stage2", tmp_path / "source")
    damage(source / "global_step2")

    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointError, match=words):
            import_deepspeed(source, tmp_path / "out")

    yield On(1, rank_main, group=False)
    assert not (tmp_path / "out").exists()
