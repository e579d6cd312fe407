"""Who does not come to a collective that a device waits for is named in time. Oracle: what each rank was told to do."""

from __future__ import annotations

import logging
import time

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from onecopy.comm.monitor import SHARE, Monitor
from ranks import run_ranks

LIMIT = 1.5


class _Wait:
    """On a device that has, or has not, come to its end."""

    def __init__(self, is_over: bool) -> None:
        self.is_over = is_over


@pytest.mark.parametrize("stays_away", [None, 2])
def test_who_stays_away_is_named_before_the_limit(stays_away: int | None) -> None:
    """Three ranks issue three collectives, the last of which never ends; rank 2 may come to the first one alone."""

    def run(rank: int) -> tuple[list[str], float]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("onecopy").addHandler(handler)
        monitor = Monitor(rank, (0, 1, 2), _get_default_store(), LIMIT)
        start = time.monotonic()
        for number, unit in enumerate("abc"[: 1 if rank == stays_away else 3], start=1):
            subject = f"all_gather of unit {unit!r} in forward over the shard axis"
            assert monitor.come_to(subject) == number
            monitor.watch(number, subject, _Wait(is_over=number < 3))
        while not said and time.monotonic() < start + LIMIT:
            time.sleep(0.01)
        waited = time.monotonic() - start
        dist.barrier()
        return said, waited

    found = run_ranks(3, run)
    for rank, (said, waited) in enumerate(found):
        if rank == stays_away:
            assert not said
            continue
        assert SHARE * LIMIT <= waited < LIMIT
        (line,) = said
        assert line.startswith(
            "all_gather of unit 'c' in forward over the shard axis, number 3 of its group, has stood"
        )
        if stays_away is None:
            assert "all ranks have come to it" in line
        else:
            assert "rank 2 has not come to it; it is 2 behind, at all_gather of unit 'a'" in line
            assert "rank 0 has" not in line
            assert "rank 1 has" not in line
