"""Whole parameters that rest in files: the user's own optimizer steps over them bucket by bucket, as in memory.

Oracles: plain PyTorch in one process, which adds what each rank would compute in their order; where a case needs what
one process has not, the same loop without ``offload=``.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import _room
from test_whole_parameters import OPTIMIZERS, ROWS, STEPS, Both, is_matrix, muon_and_adamw, train_alone
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy import Offload
from onecopy.errors import OffloadError, UsageError
from onecopy.sharding.setup.api import engine_of
from onecopy.sharding.tensor.resting import RestingTensor
from oracle import assert_same_weights, gathered_weights, part, train
from ranks import run_ranks


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage, num_ranks, parameters", [(3, 1, True), (2, 2, False), (3, 3, True)])
@one_fork
def test_trains_to_the_bits_of_one_process(
    name: str, stage: int, num_ranks: int, parameters: bool, tmp_path: Path
) -> Forked:
    def run(rank: int) -> None:
        batches = token_batches(STEPS, rows=ROWS)
        model = seeded(TinyGPT)
        optimizers = OPTIMIZERS[name](model)
        offload = Offload(tmp_path, tmp_path if parameters else None)
        onecopy.shard(model, stage, optimizer=optimizers, offload=offload)
        train(model, Both(*optimizers), [part(batch, rank, num_ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), train_alone(OPTIMIZERS[name], num_ranks, batches), atol=0)

    yield On(num_ranks, run)


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
@one_fork
def test_settings_change_no_bit(precision: str, tmp_path: Path) -> Forked:
    """With clipping and accumulation. Oracle: the same without offload."""

    def run(rank: int) -> None:
        batches = [part(batch, rank, 2) for batch in token_batches(4, rows=ROWS)]
        found = []
        for offload in (None, Offload(tmp_path, tmp_path)):
            settings: dict[str, Any] = {"precision": precision, "accumulate": 2}
            model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix, offload=offload, **settings)
            optimizers = muon_and_adamw(model)
            run = train(model, Both(*optimizers), batches, accumulate=2, clip=0.5)
            found.append((run.losses, run.norms, gathered_weights(model)))
        assert found[0][:2] == found[1][:2]
        assert_same_weights(found[1][2], found[0][2], atol=0)

    yield On(2, run)


class Looks(optim.SGD):
    """Notes what a step sees, and keeps states of several kinds."""

    seen: list[tuple[type, tuple[int, ...], bool]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = []
        for group in self.param_groups:
            for p in group["params"]:
                self.seen.append((type(p), tuple(p.shape), type(p.grad) is Tensor))
                state = self.state[p]
                state["like"] = state.get("like", torch.zeros_like(p)) + 1.0
                state.setdefault("rows", torch.zeros(len(p), 1)).add_(1.0)
                state.setdefault("parts", [torch.ones(2, 2), [], None])
                p.grad.mul_(2.0)
                p.data.add_(state["like"])


onecopy.needs_whole(Looks)


@one_fork
def test_what_the_step_sees_and_what_it_leaves(tmp_path: Path) -> Forked:
    """States of a parameter's shape rest in the file; what has another shape stays in memory."""

    def run(rank: int) -> tuple[list[str], int, int]:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix, offload=Offload(tmp_path))
        before = gathered_weights(model)
        matrices: list[Any] = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        optimizer = Looks(matrices, lr=1e-2)
        owned = [p for p in matrices if p.slicing.is_owned]
        for step in (1.0, 2.0):
            model(*part(token_batches(1)[0], rank, 2)).backward()
            gradients = {p.slicing.name: p.grad.local for p in owned}
            optimizer.step()
            assert sorted(optimizer.seen) == sorted((nn.Parameter, tuple(p.shape), True) for p in owned)
            assert {id(p) for p in optimizer.state} == {id(p) for p in owned}
            for p in owned:
                states = optimizer.state[p]
                assert type(states["like"]) is RestingTensor
                assert torch.equal(states["like"].local, torch.full((p.numel(),), step))
                assert type(states["rows"]) is Tensor
                assert states["rows"].unique().tolist() == [step]
                assert torch.equal(p.grad.local, 2.0 * gradients[p.slicing.name]), "as in memory"
            optimizer.zero_grad()
        after = gathered_weights(model)
        assert all(torch.equal(after[p.slicing.name], before[p.slicing.name] + 1.0 + 2.0) for p in matrices)
        stores, meter = engine_of(model).stores, onecopy.meter(model)
        assert stores is not None
        assert stores.pool._lent == 0
        assert all(vars(p).get("_onecopy_stand_in") is None for p in matrices), "nothing is held of what rests"
        numel = sum(p.numel() for p in owned)
        assert meter.live["optimizer"] == sum(4 * len(p) + 16 for p in owned)
        return [p.slicing.name for p in owned], numel, meter.off_device["optimizer, on disk"]

    found = yield On(2, run)
    expected = [name for name, p in TinyGPT().named_parameters() if is_matrix(name, p)]
    assert sorted(name for names, *_ in found for name in names) == sorted(expected)
    assert all(on_disk == 4 * numel for _, numel, on_disk in found)


@one_fork
def test_a_step_moves_each_page_of_whole_matrices_once(tmp_path: Path) -> Forked:
    """Muon reads master, gradient and momentum and writes master and momentum; in whole blocks of 4096 bytes."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT, dim=64), 2, whole=is_matrix, offload=Offload(tmp_path))
        muon, adamw = muon_and_adamw(model)
        for _ in range(3):
            model(*part(token_batches(1)[0], rank, 2)).backward()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        step = onecopy.ledger(model).last_step
        assert step is not None
        blocks = {True: 0, False: 0}
        for bucket in (bucket for unit in engine_of(model).units for bucket in unit.buckets):
            (is_whole,) = {entry.sliced.slicing.is_whole for entry in bucket.entries}
            blocks[is_whole] += -(-4 * bucket.slice_numel // 4096) * 4096
        assert step.bytes_sent("from disk", "step") == 3 * blocks[True] + 4 * blocks[False]
        assert step.bytes_sent("to disk", "step") == 2 * blocks[True] + 3 * blocks[False]

    yield On(2, run)


def test_a_run_goes_on_from_disk_to_memory_and_back(tmp_path: Path) -> None:
    """Through checkpoints. Oracle: the run without offload that never stopped."""
    offload = Offload(tmp_path / "states", tmp_path / "states")

    def run(rank: int) -> None:
        batches = [part(batch, rank, 2) for batch in token_batches(6, rows=ROWS)]

        def job(where: Offload | None) -> tuple[Any, list[Any]]:
            model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix, offload=where)
            return model, muon_and_adamw(model)

        model, optimizers = job(None)
        train(model, Both(*optimizers), batches)
        expected = gathered_weights(model)
        for number, places in enumerate(((None, offload, None), (offload, None, offload))):
            for third, where in enumerate(places):
                model, optimizers = job(where)
                if third:
                    onecopy.load(tmp_path / str(number), model, optimizers)
                    states = [s["momentum_buffer"] for s in optimizers[0].state.values()]
                    assert states
                    assert all((type(state) is RestingTensor) == (where is not None) for state in states)
                train(model, Both(*optimizers), batches[2 * third : 2 * third + 2])
                onecopy.save(tmp_path / str(number), model, optimizers)
            assert_same_weights(gathered_weights(model), expected, atol=0)

    run_ranks(2, run)


@one_fork
def test_torchs_own_state_dicts_have_every_owners_states(tmp_path: Path) -> Forked:
    """Oracle: the same step in memory."""

    def run(rank: int) -> None:
        found = []
        for offload in (None, Offload(tmp_path)):
            model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix, offload=offload)
            muon = muon_and_adamw(model)[0]
            model(*part(token_batches(1)[0], rank, 2)).backward()
            muon.step()
            options = StateDictOptions(full_state_dict=True)
            found.append(get_optimizer_state_dict(model, muon, options=options)["state"])
        expected, at_rest = found
        assert len(expected) == sum(is_matrix(name, p) for name, p in model.named_parameters())
        assert at_rest.keys() == expected.keys()
        assert_same_weights(*({n: s["momentum_buffer"] for n, s in one.items()} for one in found), atol=0)

    yield On(2, run)


def test_a_step_that_finds_no_room_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    """Oracle: the same steps in one process, once there is room."""

    def run(rank: int) -> list[str]:
        told = []
        for name in ("Muon and AdamW", "Adafactor", "Rprop"):
            batches = token_batches(2, rows=ROWS)
            model = seeded(TinyGPT)
            optimizers = OPTIMIZERS[name](model)
            onecopy.shard(model, 3, optimizer=optimizers, offload=Offload(tmp_path))
            before = gathered_weights(model)
            model(*part(batches[0], rank, 2)).backward()
            if name == "Adafactor":
                # Of a matrix it keeps a row and a column; of the rest one value each.
                told.append("")
            else:
                if rank == 0:
                    _room(engine_of(model).stores.optimizer.size)  # type: ignore[union-attr]
                with pytest.raises(OffloadError) as caught:
                    optimizers[0].step()
                _room(resource.RLIM_INFINITY)
                told.append(str(caught.value))
                assert_same_weights(gathered_weights(model), before, atol=0)
                assert onecopy.meter(model).off_device.get("optimizer, on disk", 0) == 0
            model.zero_grad()
            train(model, Both(*optimizers), [part(batch, rank, 2) for batch in batches])
            assert_same_weights(gathered_weights(model), train_alone(OPTIMIZERS[name], 2, batches), atol=0)
        return [line for line in told if line]

    for first, second in zip(*run_ranks(2, run), strict=True):
        assert "cannot reserve" in first
        assert "rank 0 has no room" in second


class Fails(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                self.state[p]["seen"] = torch.ones_like(p)
                p.add_(1.0)
            if number == 1:
                raise ArithmeticError("in the middle")


onecopy.needs_whole(Fails)


@one_fork
def test_an_optimizer_that_raises_leaves_states_by_their_parameters(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 2, whole=is_matrix, offload=Offload(tmp_path))
        before = gathered_weights(model)
        matrices: list[Any] = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        optimizer = Fails(matrices)
        model(*token_batches(1)[0]).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        stores = engine_of(model).stores
        assert stores is not None
        assert stores.pool._lent == 0
        after = gathered_weights(model)
        moved = [p for p in matrices if torch.equal(after[p.slicing.name], before[p.slicing.name] + 1.0)]
        assert {id(p) for p in optimizer.state} == {id(p) for p in moved} != set()
        assert all(type(states["seen"]) is RestingTensor for states in optimizer.state.values())
        train(model, Both(*muon_and_adamw(model)), token_batches(1))

    yield On(1, run)


@one_fork
def test_whole_parameters_of_two_models_want_two_optimizers(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        models = [
            onecopy.shard(seeded(TinyGPT), 2, whole=is_matrix, offload=Offload(tmp_path) if on_disk else None)
            for on_disk in (True, False)
        ]
        matrices = [p for model in models for name, p in model.named_parameters() if is_matrix(name, p)]
        optimizer = optim.Muon(matrices)
        for model in models:
            model(*token_batches(1)[0]).backward()
        with pytest.raises(UsageError, match="an optimizer for each of the two models"):
            optimizer.step()
        AdamW(models[0].parameters()).step()

    yield On(2, run)
