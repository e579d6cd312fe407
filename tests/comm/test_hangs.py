"""A rank that hangs, or dies, in any collective of a job: the others name it, a hanging one within the time limit.

A job is run once to see which collectives it has, of training and of checkpoints. Then it is run again for each kind of
them, and one rank stops there. Oracles: the clock, and the number of the rank that was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

import onecopy
from models import Stack, seeded, vector_batches
from onecopy.checkpoint import group as group_module
from onecopy.comm import mesh
from onecopy.errors import CollectiveError
from oracle import part
from ranks import RankError, run_ranks

LIMIT = 0.6
"""Seconds that the process group allows a message."""

SLACK = 4.0
"""Seconds that two noisy cores may take on top."""


@contextmanager
def _watched(at: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Every collective that begins inside: ``at`` is called with its number and what it is for."""
    seen: list[str] = []
    collective, swap = mesh.Collective, group_module.swap

    def note(what: str) -> None:
        seen.append(what)
        at(len(seen) - 1, what)

    def issue(program: Any, label: Any, *rest: Any) -> Any:
        note(label.op)
        return collective(program, label, *rest)

    def send(group: Any, given: Any, sources: Any) -> Any:
        note(f"checkpoint's {'gather' if not sources else 'scatter' if not given else 'exchange'}")
        return swap(group, given, sources)

    mesh.Collective, group_module.swap = issue, send  # type: ignore[misc,assignment]
    try:
        yield seen
    finally:
        mesh.Collective, group_module.swap = collective, swap  # type: ignore[misc]


def _job(rank: int, size: int, stage: int, directory: Path) -> None:
    model = onecopy.shard(seeded(Stack), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(*part(vector_batches(1)[0], rank, size))).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    with onecopy.gathered(model):
        pass
    onecopy.save(directory, model, optimizer, background=True).wait()
    onecopy.load(directory, model, optimizer)


def _kinds(size: int, stage: int, directory: Path) -> dict[str, int]:
    """The last collective of each kind: that the earlier ones work is seen on the way."""

    def run(rank: int) -> list[str]:
        with _watched(lambda number, what: None) as seen:
            _job(rank, size, stage, directory)
        return seen

    return {what: number for number, what in enumerate(run_ranks(size, run)[1])}


def _stop(size: int, stage: int, number: int, directory: Path, *, dies: bool) -> list[str]:
    """What the others say when rank 1 stops at its collective of that number."""
    directory.mkdir()

    def said(rank: int) -> Path:
        return directory / f"rank-{rank}"

    def stop(current: int, what: str) -> None:
        if current == number:
            if dies:
                os._exit(9)
            while not all(said(rank).exists() for rank in range(size) if rank != 1):
                time.sleep(0.02)
            raise InterruptedError

    def run(rank: int) -> None:
        if rank == 1:
            with _watched(stop):
                try:
                    _job(rank, size, stage, directory / "c")
                except (InterruptedError, CollectiveError):
                    return
            raise AssertionError("the job has no such collective")
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            _job(rank, size, stage, directory / "c")
        assert time.monotonic() - start < LIMIT + SLACK
        said(rank).with_suffix(".tmp").write_text(str(caught.value))
        said(rank).with_suffix(".tmp").rename(said(rank))

    with pytest.raises(RankError, match="rank 1 died") if dies else nullcontext():
        run_ranks(size, run, group_timeout=LIMIT)
    return [said(rank).read_text() for rank in range(size) if rank != 1]


@pytest.mark.parametrize("stage, size", [(3, 2), (0, 3)])
def test_a_rank_that_hangs_in_any_collective_is_named_within_the_limit(stage: int, size: int, tmp_path: Path) -> None:
    """Of three ranks one may have gone on and wait for the one that names it, or lose that one as it gives up."""
    kinds = _kinds(size, stage, tmp_path / "dry")
    assert {"agree", "checkpoint's exchange", "checkpoint's gather" if size == 3 else "reduce_scatter"} <= set(kinds)
    for what, number in kinds.items():
        messages = _stop(size, stage, number, tmp_path / str(number), dies=False)
        assert any("no answer from rank 1 within" in message for message in messages), (what, messages)


def test_a_rank_that_dies_in_any_collective_is_named(tmp_path: Path) -> None:
    for what, number in _kinds(3, 3, tmp_path / "dry").items():
        messages = _stop(3, 3, number, tmp_path / str(number), dies=True)
        assert any("rank 1" in message for message in messages), (what, messages)


def test_the_group_of_checkpoints_has_the_limit_that_the_user_set() -> None:
    def run(rank: int) -> float:
        from onecopy.comm.backends import time_limit

        handle = group_module.Group.current().handle
        assert handle is not None
        return time_limit(handle).total_seconds()

    assert run_ranks(2, run, group_timeout=17.0) == [17.0, 17.0]


def test_the_axes_of_a_jobs_mesh_have_the_limit_that_the_config_sets() -> None:
    from onecopy.comm.backends import time_limit
    from onecopy.recipes.settings import load
    from onecopy.recipes.sharded import mesh_for
    from onecopy.recipes.world import World

    config = load(None, {"parallel.replicate": 2, "parallel.tensor": 2, "parallel.timeout": 7.0})

    def run(rank: int) -> list[tuple[float, list[int]]]:
        found = mesh_for(config, World(rank, rank, 4, torch.device("cpu")))
        assert found is not None
        groups = [found.get_group(name) for name in ("replicate", "shard", "tensor")]
        return [(time_limit(group).total_seconds(), dist.get_process_group_ranks(group)) for group in groups]

    assert run_ranks(4, run)[3] == [(7.0, [1, 3]), (7.0, [3]), (7.0, [2, 3])]
