"""Slices are cut anew for other numbers of ranks. Oracles: a checkpoint's files, loaded on as many; counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy.errors import RecoveryError, SettingsError
from onecopy.resilience.dividing import divide
from onecopy.resilience.meeting import leave, shape_among
from onecopy.resilience.recutting import Move, plan_moves
from onecopy.resilience.settling import MIRROR, OWN, Seat, Standing
from onecopy.sharding.bucket.layout import Layout, Overlap
from onecopy.sharding.setup.api import engine_of
from ranks import run_ranks


def _standings(*, was: int, survivors: list[int], newcomers: int = 0) -> list[Standing]:
    ranks = len(survivors) + newcomers
    found = [Standing(5, True, place, 0, Seat(old, was, old, was)) for place, old in enumerate(survivors)]
    return found + [Standing(-1, False, place, 0, None) for place in range(len(survivors), ranks)]


def test_a_lost_slice_comes_from_its_mirror_and_what_a_rank_holds_stays_with_it() -> None:
    moves = plan_moves(_standings(was=3, survivors=[0, 2]), places=2, mirrored=True, mirrors=False)
    assert moves == [
        Move(0, 0, OWN, OWN, 0, 0),
        Move(0, 0, MIRROR, OWN, 1, 0),
        Move(1, 0, OWN, OWN, 2, 0),
        Move(1, 1, MIRROR, OWN, 0, 1),
        Move(0, 1, MIRROR, OWN, 1, 1),
        Move(1, 1, OWN, OWN, 2, 1),
    ]


def test_a_newcomer_sends_nothing_and_gets_all_that_it_is_to_hold() -> None:
    moves = plan_moves(_standings(was=2, survivors=[0, 1], newcomers=1), places=3, mirrored=True, mirrors=True)
    assert {move.sender for move in moves} == {0, 1}
    assert {(move.given, move.new) for move in moves if move.receiver == 2} == {(OWN, 2), (MIRROR, 0)}


def test_a_slice_that_nobody_holds_is_named() -> None:
    with pytest.raises(RecoveryError, match="every rank that held slice 2 of 4 is lost"):
        plan_moves(_standings(was=4, survivors=[0, 3]), places=2, mirrored=True, mirrors=True)


def test_slices_of_two_layouts_share_what_both_hold() -> None:
    # Parameters of 20 and 10 elements: 24 + 10, so slices of 24 and of 16 elements.
    two, three = Layout((20, 10), 2), Layout((20, 10), 3)
    assert (two.lengths, three.lengths) == ((24, 24), (16, 16, 16))
    assert two.overlaps(0, three, 0) == [Overlap(0, 0, 0, 16)]
    assert two.overlaps(0, three, 1) == [Overlap(0, 16, 0, 4)]
    assert two.overlaps(1, three, 1) == [Overlap(1, 0, 0, 8)]
    assert two.overlaps(1, three, 2) == [Overlap(1, 8, 0, 2)]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("global_batch, most", [(8, 2), (13, 4), (3, 1), (64, 64)])
def test_a_global_batch_stays_the_same_on_any_number_of_ranks(global_batch: int, most: int, ranks: int) -> None:
    found = [divide(global_batch, most, rank, ranks) for rank in range(ranks)]
    assert len({len(own) for own in found}) == 1
    used = [m for own in found for m in own if m.weight]
    samples = [sample for m in used for sample in range(global_batch)[m.samples]]
    assert samples == list(range(global_batch))
    assert max(m.samples.stop - m.samples.start for own in found for m in own) <= most
    # A gradient is the mean over ranks of a sum of weighted means.
    for m in used:
        assert m.weight / ranks == pytest.approx((m.samples.stop - m.samples.start) / global_batch)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match="numbers of samples of 1 and more; found 0 and 2"):
        divide(0, 2, 0, 1)


def test_a_mesh_has_fewer_slices_with_as_many_holders() -> None:
    assert shape_among(("cpu", (2, 3), ("replicate", "shard")), 4) == ("cpu", [2, 2], ("replicate", "shard"))
    assert shape_among(None, 4) is None
    with pytest.raises(SettingsError, match="3 ranks cannot hold each slice 2 times"):
        shape_among(("cpu", (2, 2), ("replicate", "shard")), 3)


def _make(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))
    mirror = stage > 0 and dist.get_world_size() > 1
    onecopy.shard(model, stage, units=list(model), mirror=mirror)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of every parameter, in the order of its groups."""
    found: list[Tensor] = []
    for parameter in optimizer.param_groups[0]["params"]:
        for _, value in sorted(optimizer.state[parameter].items()):
            found.append(value.local if isinstance(value, onecopy.SlicedTensor) else value)
    return found


def _train(run: onecopy.Run, model: nn.Module, steps: int) -> None:
    for _ in run.loop(lambda step: range(step, steps)):
        with run:
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * run.steps + run.rank))
            model(x).pow(2).mean().backward()
            run.step()


def _shrink(rank: int, folder: Path, stage: int, sizes: tuple[int, ...]) -> list[str]:
    """Train on fewer and fewer ranks, the last of which go on. Returns what differs from loading a checkpoint."""
    model, optimizer = _make(stage)
    run: Any = onecopy.resilient(model, optimizer)
    engine, holdings, different = engine_of(model), run._holdings, []
    parameters = list(model.parameters())
    for number, size in enumerate(sizes):
        _train(run, model, 3 * number + 3)
        onecopy.save(folder / f"saved-{number}", model, optimizer, step=run.steps)
        version, seat = run._commits.version, holdings.seat
        # As after a loss, but for the launcher: those who stay meet over groups of their own.
        engine.abandon()
        leave()
        gone = seat.ranks // 2 if size > 1 else 0
        new = [old for old in range(seat.ranks) if old != gone][:size].index(seat.rank) if seat.rank != gone else -1
        if seat.rank == gone or new < 0:
            return different
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / f"met-{number}"), size), rank=new, world_size=size
        )
        engine.mesh.reconnect(None)
        holdings.connect()
        standing = Standing(version, True, engine.mesh.shard.rank, 0, seat)
        holdings.take(holdings.world.exchange_objects(standing), version, number)
        engine.meet_anew()
        run._top.knows = [True] * size
        run.check()
        other, its_own = _make(stage)
        onecopy.load(folder / f"saved-{number}", other, its_own)
        for name, found, expected in (
            ("masters", [p.local for p in parameters], [p.local for p in other.parameters()]),
            ("states", _states(optimizer), _states(its_own)),
        ):
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                different.append(f"{name} on rank {new} of {size}")
        if [id(p) for p in model.parameters()] != [id(p) for p in parameters]:
            different.append("parameters are other objects")
        held = onecopy.meter(model).live["mirror"]
        mirror = holdings.held.get(MIRROR)
        if held != (mirror.held_bytes if mirror else 0) or (size > 1 and stage > 0 and not held):
            different.append(f"the meter counts {held} bytes of mirrors")
    _train(run, model, 3 * len(sizes) + 3)
    run.check()
    return different


@pytest.mark.parametrize(
    "stage, sizes, transport",
    [(3, (3, 2, 1), "memory"), (2, (2,), "sockets"), (1, (3,), "memory"), (0, (3,), "sockets")],
)
def test_what_is_cut_in_memory_is_what_a_checkpoint_gives(
    tmp_path: Path, stage: int, sizes: tuple[int, ...], transport: str
) -> None:
    first = {(3, 2, 1): 4, (2,): 3, (3,): 4}[sizes]
    assert run_ranks(first, _shrink, tmp_path, stage, sizes, transport=transport) == [[]] * first
