"""Cases that share a fork: each has its own answers, or its own failure. Oracle: what each of them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from one_fork import Case, Forked, On, one_fork, run_together
from ranks import RankError


def _cases(*functions: Callable[[int], Any]) -> tuple[list[Case], dict[str, Any]]:
    """A case of two ranks for each function, begun, and a place for what each gets."""
    found: dict[str, Any] = {}

    def steps(function: Callable[[int], Any]) -> Forked:
        found[function.__name__] = yield On(2, function)

    cases = [Case(function.__name__, Path(__file__), steps(function)) for function in functions]
    for case in cases:
        case.go_on(None)
    return cases, found


def _first(rank: int) -> tuple[int, int]:
    os.environ["ONLY_FOR_FIRST"] = "1"
    return rank, os.getpid()


def _second(rank: int) -> tuple[int, int]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    assert "ONLY_FOR_FIRST" not in os.environ
    return int(total), os.getpid()


def _fails(rank: int) -> None:
    if rank:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))


def _dies(rank: int) -> None:
    if rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _sends_a_function(rank: int) -> Callable[[], int]:
    return lambda: rank


def test_cases_share_processes_and_have_their_own_answers() -> None:
    cases, found = _cases(_first, _second)
    run_together(list(cases))
    assert [case.error for case in cases] == [None, None]
    assert [value for value, _ in found["_first"]] == [0, 1]
    assert [value for value, _ in found["_second"]] == [1, 1]
    assert [pid for _, pid in found["_first"]] == [pid for _, pid in found["_second"]]


@pytest.mark.parametrize(
    "bad, words",
    [
        (_fails, r"^rank 1 failed:(.|\n)*in _fails(.|\n)*on purpose"),
        (_dies, r"^rank 1 died \(exit code 7\)"),
        (_sends_a_function, "pickle"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_case_that_fails_is_the_only_one_that_does(bad: Callable[[int], Any], words: str, position: int) -> None:
    functions: list[Callable[[int], Any]] = [_first, _second]
    functions.insert(position, bad)
    cases, found = _cases(*functions)
    run_together(list(cases))
    for case, function in zip(cases, functions, strict=True):
        assert (case.error is not None) == (function is bad)
    with pytest.raises(RankError, match=words):
        raise cases[position].error or AssertionError
    assert [value for value, _ in found["_first"]] == [0, 1]
    assert [value for value, _ in found["_second"]] == [1, 1]


@pytest.mark.parametrize("size", [1, 2])
@one_fork
def test_a_test_may_go_to_ranks_several_times_and_sees_them_fail(size: int, tmp_path: Path) -> Forked:
    assert (yield On(size, lambda rank, more: rank + more, 5)) == list(range(5, 5 + size))
    (tmp_path / "seen").touch()
    assert (yield On(1, lambda rank: (dist.is_initialized(), os.listdir(tmp_path)), group=False)) == [(False, ["seen"])]
    with pytest.raises(RankError, match="rank 0 failed"):
        yield On(size, lambda rank: 1 // 0)
