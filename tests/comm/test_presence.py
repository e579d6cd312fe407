"""Slices are read without their owner's doing: models that are dropped, and programs that end, before the last reader.

The oracle is the same program with ranks that end together.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.errors import OnecopyError
from onecopy.sharding.engine.engine import find_engine
from oracle import part
from programs import Programs, interpreter
from ranks import run_ranks

TRANSPORTS = ["memory", "sockets"]


def _loss_of_a_late_rank(rank: int, *, drops: bool, lags: bool) -> list[float]:
    """One training step, then a forward; rank 1 comes late to it, and rank 0 may have dropped the model by then."""
    model = onecopy.shard(seeded(Stack), 3)
    batch = part(vector_batches(1)[0], rank, 2)
    model(*batch).backward()
    SGD(model.parameters(), lr=0.1).step()
    if lags and rank:
        time.sleep(0.5)
    with torch.no_grad():
        losses = [float(model(*batch))]
    if drops:
        del model
        gc.collect()
        # Whoever asks for memory gets what the model has left.
        other = [torch.full((numel,), 7.0) for numel in range(1, 600)]
        again = onecopy.shard(seeded(Stack), 3)
        with torch.no_grad():
            losses += [float(again(*batch)) for _ in range(3)]
        assert len(other) == 599
    return losses


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_dropped_early_is_read_whole_as_one_that_is_kept(transport: str) -> None:
    expected = run_ranks(2, lambda rank: _loss_of_a_late_rank(rank, drops=False, lags=False), transport=transport)
    found = run_ranks(2, lambda rank: _loss_of_a_late_rank(rank, drops=True, lags=True), transport=transport)
    assert [losses[0] for losses in found] == [losses[0] for losses in expected]


def test_memory_of_a_dropped_model_is_given_back_once_all_ranks_have_met_twice() -> None:
    """By a weak reference to the slice."""

    def run(rank: int) -> list[bool]:
        model = onecopy.shard(seeded(Stack), 3)
        engine = find_engine(model)
        assert engine is not None
        kept = weakref.ref(engine.units[0].buckets[0].masters.in_memory)
        del engine
        del model
        gc.collect()
        seen = [kept() is None]
        for _ in range(2):
            other = onecopy.shard(seeded(Stack), 3)
            seen.append(kept() is None)
        del other
        return seen

    assert run_ranks(2, run) == [[False, False, True]] * 2


def test_a_rank_that_reads_what_another_has_dropped_long_ago_is_told() -> None:
    def run(rank: int) -> str:
        model = onecopy.shard(seeded(Stack), 3)
        batch = part(vector_batches(1)[0], rank, 2)
        if rank == 0:
            del model
            gc.collect()
        for _ in range(3):
            onecopy.shard(seeded(Stack), 1)
        if rank == 0:
            return ""
        with pytest.raises(OnecopyError) as caught:
            model(*batch)
        return str(caught.value)

    assert "deleted its model" in run_ranks(2, run)[1]


PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, onecopy
from datetime import timedelta

rank, how = int(os.environ["RANK"]), sys.argv[1]
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = onecopy.shard(torch.nn.Sequential(*layers), 3, units=["0", "1", "2", "3"])
x = torch.ones(4, 64)
model(x).sum().backward()
if rank:
    time.sleep(0.4)
with torch.no_grad():
    print(float(model(x).sum()))
if how == "destroys":
    dist.destroy_process_group()
if how == "drops":
    del model
if how == "fails" and rank == 0:
    raise ValueError("of its own")
if how == "exits" and rank == 0:
    sys.exit(3)
if how == "goes on" and rank == 1:
    model(x).sum().backward()
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with interpreter() as made:
        yield made


def _run_program(
    programs: Programs, folder: Path, transport: str, how: str
) -> tuple[list[int], list[str], list[str], float]:
    """Codes, outputs and errors of two ranks, and the seconds that they took."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    start = time.monotonic()
    memory = {"ONECOPY_CROSS_MEMORY": "1" if transport == "memory" else "0"}
    ended = programs.run(
        [str(program), how, str(folder / "store")], [memory | {"RANK": str(rank)} for rank in range(2)], folder
    )
    return *ended, time.monotonic() - start


@pytest.mark.parametrize(("how", "transport"), [("ends", "memory"), ("destroys", "sockets"), ("drops", "sockets")])
def test_a_program_that_ends_early_stays_for_a_late_reader(
    how: str, transport: str, programs: Programs, tmp_path: Path
) -> None:
    """Both ranks print the same number and end well; the number is that of one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    with torch.no_grad():
        expected = float(model(torch.ones(4, 64)).sum())
    codes, outputs, errors, _ = _run_program(programs, tmp_path, transport, how)
    assert codes == [0, 0], errors
    assert [float(text) for text in outputs] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_goes_on_when_the_other_has_ended_is_told_at_once(
    transport: str, programs: Programs, tmp_path: Path
) -> None:
    """Of the group's 60 seconds."""
    codes, _, errors, seconds = _run_program(programs, tmp_path, transport, "goes on")
    assert codes == [0, 1], errors
    assert "CollectiveError: reduce_scatter" in errors[1]
    assert "rank 0" in errors[1]
    assert seconds < 30


@pytest.mark.parametrize(
    ("how", "code", "text", "transport"),
    [("fails", 1, "ValueError: of its own", "sockets"), ("exits", 3, "", "memory")],
)
def test_a_rank_that_fails_at_its_end_does_not_stay(
    how: str, code: int, text: str, transport: str, programs: Programs, tmp_path: Path
) -> None:
    codes, _, errors, seconds = _run_program(programs, tmp_path, transport, how)
    assert codes[0] == code, errors
    assert text in errors[0]
    assert seconds < 30


def test_process_groups_send_and_receive_by_methods() -> None:
    """comm/serving.py; read in torch 2.13. They serve a group that was destroyed, as torch's functions do not."""

    def run(rank: int) -> float:
        group = torch.distributed.group.WORLD
        assert group is not None
        torch.distributed.destroy_process_group()
        value: Tensor = torch.full((1,), float(rank))
        if rank:
            group.send([value], 0, 5).wait()
        else:
            group.recv_anysource([value], 5).wait()
        sent = group.send([value], 1 - rank, 6)
        found = torch.zeros(1)
        group.recv([found], 1 - rank, 6).wait()
        sent.wait()
        return float(found)

    assert run_ranks(2, run) == [1.0, 1.0]
