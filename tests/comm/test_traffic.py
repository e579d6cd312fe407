"""Bytes sent per step equal design.md's table exactly, for every stage, N and g, with padding accounted for.

Oracle: the closed forms of ZeRO §7 in elements, times (N - 1)/N, times the size of the dtype on the wire. Ψ is the
padded number of elements, which is itself held between the true number and a bound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from oracle import OPTIMIZERS, assert_trains_like_twin, part, train


def table(stage: int, g: int) -> int:
    """Design.md: bytes a rank sends per step in multiples of Ψ(N - 1)/N elements, with g micro-batches."""
    return {0: 2, 1: 2, 2: g + 1, 3: 3 * g}[stage]


def by_operation(stage: int, g: int) -> dict[tuple[str, str], int]:
    """The same by (operation, phase): one gather after a step, or one in each forward and backward."""
    return {
        0: {("all_reduce", "backward"): 2},
        1: {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1},
        2: {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): g},
        3: {("all_gather", "forward"): g, ("all_gather", "backward"): g, ("reduce_scatter", "backward"): g},
    }[stage]


def _steps(
    rank: int, num_ranks: int, stage: int, g: int, precision: str, steps: int = 3, **settings: Any
) -> tuple[list[onecopy.Traffic], int]:
    model = onecopy.shard(seeded(TinyGPT, layers=3), stage, precision=precision, accumulate=g, **settings)
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    batches, taken = token_batches(g * steps), []
    for step in range(steps):
        mine = [part(batch, rank, num_ranks) for batch in batches[g * step : g * (step + 1)]]
        train(model, optimizer, mine, accumulate=g, clip=1.0)
        taken.append(onecopy.ledger(model).last_step)
    assert all(traffic is not None for traffic in taken)
    return taken, onecopy.padded_numel(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("g", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_bytes_of_every_step_equal_the_table(stage: int, num_ranks: int, g: int, precision: str) -> Forked:
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    for steps, psi in (yield On(num_ranks, _steps, num_ranks, stage, g, precision, 2 if g > 1 else 3)):
        share = psi * (num_ranks - 1) * itemsize // num_ranks
        assert psi * (num_ranks - 1) * itemsize % num_ranks == 0
        for traffic in steps:
            assert traffic.state_bytes == table(stage, g) * share
            for (operation, phase), times in by_operation(stage, g).items():
                assert traffic.bytes_sent(operation, phase) == times * share


def _untold(rank: int, stage: int, micro_batches: list[int]) -> list[int]:
    """How often each step gathers the whole model, with so many micro-batches that `accumulate` does not tell of."""
    model = onecopy.shard(seeded(TinyGPT, layers=3), stage)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = iter(token_batches(sum(micro_batches)))
    taken = []
    for number in micro_batches:
        train(model, optimizer, [part(next(batches), rank, 2) for _ in range(number)], accumulate=number)
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        taken.append(2 * traffic.bytes_sent("all_gather", "forward") // (4 * onecopy.padded_numel(model)))
    return taken


@pytest.mark.parametrize("stage", [1, 2])
@one_fork
def test_untold_micro_batches_gather_once_more_and_only_once(stage: int) -> Forked:
    """Whole parameters go after the backward that a step is expected to follow; where others come, that is learnt."""
    for gathers in (yield On(2, _untold, stage, [1, 3, 3, 3, 1, 1])):
        assert gathers == [1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_a_step_of_two_optimizers_is_one_page(stage: int) -> Forked:
    """Each has a part of the parameters and clips it. Also of micro-batches that nobody told of."""

    def run(rank: int) -> tuple[list[int], int, int]:
        model = onecopy.shard(seeded(TinyGPT, layers=3), stage)
        parts = list(model.blocks.parameters()), [p for n, p in model.named_parameters() if "blocks" not in n]
        optimizers = [OPTIMIZERS["sgd"](part) for part in parts]
        sent = []
        for batches in (token_batches(1), *[token_batches(2)] * 3):
            for batch in batches:
                model(*part(batch, rank, 2)).backward()
            for parameters, optimizer in zip(parts, optimizers, strict=True):
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            traffic = onecopy.ledger(model).last_step
            assert traffic is not None
            sent.append(traffic.state_bytes)
        return sent, traffic.bytes_sent("norm"), onecopy.padded_numel(model)

    # Stages 0 and 1 send gradients twice, for nobody told of the second micro-batch; stages 1 and 2 learn it.
    expected = {0: [2, 4, 4, 4], 1: [2, 4, 3, 3], 2: [2, 4, 3, 3], 3: [3, 6, 6, 6]}[stage]
    for sent, norm, psi in (yield On(2, run)):
        assert sent == [times * psi // 2 * 4 for times in expected]
        assert norm == (0 if stage == 0 else 2 * 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_one_rank_sends_nothing(stage: int) -> Forked:
    for group in (True, False):
        ((steps, _),) = yield On(1, _steps, 1, stage, 2, "fp32", group=group)
        assert [entry for traffic in steps for entry in traffic.entries if entry.bytes_sent] == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_padding_is_bounded(stage: int, num_ranks: int) -> Forked:
    """At most 8 elements a parameter and 16 a rank and bucket: enough to align by 16 bytes, no more."""

    def run(rank: int) -> tuple[int, int]:
        model = seeded(TinyGPT)
        numel = sum(p.numel() for p in model.parameters())
        return numel, onecopy.padded_numel(onecopy.shard(model, stage))

    plain = seeded(TinyGPT)
    buckets, parameters = 3, len(list(plain.parameters()))
    for numel, padded in (yield On(num_ranks, run)):
        assert numel <= padded <= numel + 8 * parameters + 16 * num_ranks * buckets


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_units_change_nothing_in_total(stage: int) -> Forked:
    """However the model is cut into units, what travels is Ψ and its padding."""

    def run(rank: int, units: Any) -> float:
        (traffic, *_), psi = _steps(rank, 2, stage, 1, "fp32", 1, units=units)
        return traffic.state_bytes / (psi // 2 * 4)

    for units in ("auto", [], [nn.Linear], ["blocks.1", nn.LayerNorm]):
        assert (yield On(2, run, units)) == [table(stage, 1)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_no_sync_sends_as_accumulate_does(stage: int) -> Forked:
    """Stages 0 and 1 send once a step whatever g; stages 2 and 3 send in each micro-batch."""

    def run(rank: int) -> tuple[int, int]:
        model = onecopy.shard(seeded(Stack), stage)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for first, second in [vector_batches(2)] * 2:
            with model.no_sync():
                model(*part(first, rank, 2)).backward()
            model(*part(second, rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        return traffic.state_bytes, onecopy.padded_numel(model)

    for sent, psi in (yield On(2, run)):
        assert sent == table(stage, 2) * psi // 2 * 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@one_fork
def test_evaluation_gathers_once_a_forward_or_not_at_all(stage: int, mode: str) -> Forked:
    """Whole parameters that stages 1 and 2 keep until the next step serve every forward until then."""

    def run(rank: int) -> tuple[int, int]:
        model = onecopy.shard(seeded(Stack), stage)
        before = onecopy.ledger(model).total.state_bytes
        with getattr(torch, mode)():
            for batch in vector_batches(3):
                model(*part(batch, rank, 2))
        return onecopy.ledger(model).total.state_bytes - before, onecopy.padded_numel(model)

    for sent, psi in (yield On(2, run)):
        assert sent == {0: 0, 1: 1, 2: 1, 3: 3}[stage] * psi // 2 * 4


@one_fork
def test_control_messages_are_a_few_bytes() -> Forked:
    """The norm and a barrier are one number, an agreement one byte a parameter: never a hidden gradient."""

    def run(rank: int) -> dict[str, int]:
        (*_, traffic), _ = _steps(rank, 2, 3, 1, "fp32")
        return {op: traffic.bytes_sent(op) for op in {entry.op for entry in traffic.entries}}

    parameters = len(list(seeded(TinyGPT, layers=3).parameters()))
    for sent in (yield On(2, run)):
        assert sent.keys() == {"all_gather", "reduce_scatter", "norm", "agree", "barrier"}
        assert sent["norm"] == 8
        assert sent["barrier"] == 4
        assert sent["agree"] <= 8 * parameters


@one_fork
def test_the_ledger_names_units_phases_and_seconds() -> Forked:
    def run(rank: int) -> None:
        (*_, traffic), _ = _steps(rank, 2, 3, 1, "fp32")
        units = {entry.unit for entry in traffic.entries if entry.op == "reduce_scatter"}
        assert {"blocks.0", "blocks.1", "blocks.2"} < units
        assert len(units) == 4
        for unit in units:
            gathers = traffic.bytes_sent("all_gather", unit=unit)
            assert gathers == 2 * traffic.bytes_sent("reduce_scatter", unit=unit)
        assert all(entry.seconds > 0 and entry.calls >= 1 for entry in traffic.entries)

    yield On(2, run)


@one_fork
def test_total_is_setup_and_all_steps() -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 2)
        ledger = onecopy.ledger(model)
        setup = sum(entry.bytes_sent for entry in ledger.total.entries)
        assert {entry.phase for entry in ledger.total.entries} == {"setup"}
        assert ledger.last_step is None
        optimizer, sent = OPTIMIZERS["sgd"](model.parameters()), 0
        for batch in vector_batches(3):
            train(model, optimizer, [part(batch, rank, 2)])
            assert ledger.last_step is not None
            sent += sum(entry.bytes_sent for entry in ledger.last_step.entries)
        current = sum(entry.bytes_sent for entry in ledger.current.entries)
        assert sum(entry.bytes_sent for entry in ledger.total.entries) - sent - current <= setup

    yield On(2, run)


# --- hybrid sharding


def _mesh(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("replicate, shard", [(2, 2), (1, 2), (2, 1), (4, 1)])
@one_fork
def test_hybrid_mesh_sends_what_its_axes_say(stage: int, replicate: int, shard: int) -> Forked:
    """Over shard as ever, with S ranks; over replicate an all-reduce of the slice, 2(R - 1)/R · Ψ/S (FSDP §3.2.2)."""
    num_ranks = replicate * shard

    def run(rank: int) -> tuple[int, int, int, int]:
        (*_, traffic), psi = _steps(rank, num_ranks, stage, 1, "fp32", 2, mesh=_mesh(replicate, shard))
        over_shard = sum(e.bytes_sent for e in traffic.entries if e.axis == "shard" and e.op not in ("norm", "barrier"))
        over_replicate = traffic.bytes_sent("all_reduce", axis="replicate")
        control = sum(e.bytes_sent for e in traffic.entries if e.op == "agree" and e.axis == "shard")
        return over_shard - control, over_replicate, traffic.state_bytes, psi

    for over_shard, over_replicate, total, psi in (yield On(num_ranks, run)):
        assert total == over_shard + over_replicate
        if stage == 0:
            # Nothing is sharded: both axes carry an all-reduce of everything.
            assert over_shard == 2 * psi * 4 * (shard - 1) // shard
            assert over_replicate == 2 * psi * 4 * (replicate - 1) // replicate
        else:
            assert over_shard == table(stage, 1) * psi * 4 * (shard - 1) // shard
            assert over_replicate == 2 * (psi // shard) * 4 * (replicate - 1) // replicate


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("replicate, shard", [(2, 2), (1, 3), (3, 1), (2, 1)])
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_hybrid_mesh_trains_like_twin(stage: int, replicate: int, shard: int, accumulate: int) -> Forked:
    num_ranks = replicate * shard

    def run(rank: int) -> None:
        assert_trains_like_twin(
            rank,
            num_ranks,
            lambda: seeded(TinyGPT),
            token_batches(4),
            stage=stage,
            accumulate=accumulate,
            clip=0.5,
            mesh=_mesh(replicate, shard),
        )

    yield On(num_ranks, run)


@one_fork
def test_mesh_of_one_axis_over_some_of_the_ranks() -> Forked:
    """Two models on two halves of four ranks, which must not disturb each other."""

    def run(rank: int) -> None:
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
        mine = whole["shard"]
        assert dist.get_world_size(mine.get_group()) == 2
        model = onecopy.shard(seeded(Stack), 3, mesh=mine)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        half, place = divmod(rank, 2)
        for batch in vector_batches(3 + half):
            train(model, optimizer, [part(batch, place, 2)])
        twin = seeded(Stack)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3 + half))
        with onecopy.gathered(model):
            for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-6)

    yield On(4, run)
