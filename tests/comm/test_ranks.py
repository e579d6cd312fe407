"""The harness itself: values come back whole, failures by name, and nothing is left. Oracle: what each rank did."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankError, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_back_by_value_in_rank_order(num_ranks: int) -> None:
    """Twenty megabytes from each, far more than a pipe holds."""

    def run(rank: int, offset: int) -> dict[str, object]:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return {"rank": rank + offset, "total": total.item(), "large": torch.full((5_000_000,), float(rank))}

    found = run_ranks(num_ranks, run, 10)
    assert [f["rank"] for f in found] == [10 + rank for rank in range(num_ranks)]
    assert {f["total"] for f in found} == {sum(range(num_ranks))}
    assert [f["large"][-1].item() for f in found] == list(range(num_ranks))


def test_without_a_group_nothing_is_joined() -> None:
    assert run_ranks(1, lambda rank: dist.is_initialized(), group=False) == [False]


def test_the_rank_that_failed_first_is_named_with_its_traceback() -> None:
    def run(rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match=r"^rank 1 failed:(.|\n)*in run(.|\n)*on purpose"):
        run_ranks(3, run)


def test_ranks_that_do_not_finish_are_named_with_their_stacks_and_killed() -> None:
    def run(rank: int) -> None:
        if rank != 1:
            time.sleep(1000)

    with pytest.raises(RankError, match=r"still running: 0, 2(.|\n)*in run"):
        run_ranks(3, run, timeout=1)


def test_a_rank_that_crashes_is_named_with_its_signal() -> None:
    def run(rank: int) -> None:
        if rank == 1:
            ctypes.string_at(0)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match=r"rank 1 died \(SIGSEGV\)(.|\n)*in run"):
        run_ranks(2, run)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match="cannot be sent by value"):
        run_ranks(1, lambda rank: lambda: rank, group=False)


def test_no_file_descriptor_and_no_child_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(3, lambda rank: rank)
    with pytest.raises(RankError):
        run_ranks(2, lambda rank: 1 // rank)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
