"""Many cases on one fork of ranks: half of what a small case takes is the fork, and what its ranks touch first.

A test that is marked `one_fork` yields what its ranks do, and is sent what they returned. It may do so several times:

    @everywhere
    @one_fork
    def test_something(stage: int, num_ranks: int) -> Forked:
        def run(rank: int) -> int: ...

        for found in (yield On(num_ranks, run)):
            assert found == 3

All cases of a file that pytest has selected, and that need the same ranks, run one after the other when the first of
them is asked for. Each remains a test of its own. A case that fails, hangs or loses a rank is reported alone, with the
traceback of its rank; the others run again without it, on other ranks. One that is selected alone runs alone.
`run_ranks` is for everything else: what sets the parent up, leaves no group to the next case, or weighs a process.
"""

from __future__ import annotations

import gc
import inspect
import io
import mmap
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import RankError, run_ranks

MOST = 60
"""Cases on one fork: the first of them waits for all."""


class On:
    """What a case does on ranks; the arguments are `run_ranks`'s."""

    def __init__(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        group: bool = True,
        transport: str | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.function = function
        self.args = args
        self.group = group
        self.transport = transport

    @property
    def ranks(self) -> tuple[int, bool, str | None]:
        """Cases for which this is equal can share a fork."""
        return self.num_ranks, self.group, self.transport


Forked = Generator[On, list[Any], None]
"""What a test is that is marked `one_fork`."""


@dataclass(eq=False)
class Case:
    """A test that is under way.

    Attributes:
        on: what it waits for; None if it is over.
        error: how it ended, if not well.
    """

    name: str
    file: Path
    steps: Forked
    on: On | None = None
    error: BaseException | None = None

    def shares_with(self, other: Case) -> bool:
        """Whether both wait for the same ranks."""
        mine, others = self.on, other.on
        return self.file == other.file and mine is not None and others is not None and mine.ranks == others.ranks

    def go_on(self, answers: list[Any] | RankError | None) -> None:
        """Up to what it waits for next, given what it has waited for."""
        try:
            failed = isinstance(answers, RankError)
            self.on = self.steps.throw(answers) if failed else self.steps.send(answers)  # type: ignore[arg-type]
        except StopIteration:
            self.on = None
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            self.on, self.error = None, error


_begun: dict[str, Case] = {}
"""By name, cases that have been started and not yet been asked for."""


def one_fork(test: Callable[..., Forked]) -> Callable[..., None]:
    """Make a test of a generator. It may use values of its marks, `tmp_path`, and fixtures of its module's scope."""

    @wraps(test)
    def asked(request: pytest.FixtureRequest, **_: Any) -> None:
        __tracebackhide__ = True
        name = request.node.nodeid
        if name not in _begun:
            for item in _not_begun(request.node):
                _begun[item.nodeid] = _begin(item, request)
        case = _begun[name]
        while case.on is not None:
            others = [one for one in _begun.values() if one is not case and one.shares_with(case)]
            run_together([case, *others[: MOST - 1]])
        del _begun[name]
        if case.error is not None:
            raise case.error

    wanted = [one for one in inspect.signature(test).parameters.values() if one.name != "tmp_path"]
    own = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asked.__signature__ = inspect.Signature([own, *wanted])  # type: ignore[attr-defined]
    asked.begins = test  # type: ignore[attr-defined]
    return asked


def _not_begun(item: pytest.Item) -> list[Any]:
    """This test, and the marked ones of its file that follow it and are not skipped."""
    items = item.session.items
    return [item] + [
        other
        for other in items[items.index(item) + 1 :]
        if other.path == item.path
        and hasattr(getattr(other, "function", None), "begins")
        and other.nodeid not in _begun
        and not any(mark.name in ("skip", "skipif") for mark in other.iter_markers())
    ]


def _begin(item: Any, request: pytest.FixtureRequest) -> Case:
    test = item.function.begins
    values = item.callspec.params if hasattr(item, "callspec") else {}
    given = {}
    for name in inspect.signature(test).parameters:
        if name == "tmp_path":
            given[name] = request.getfixturevalue("tmp_path_factory").mktemp("case")
        else:
            given[name] = values[name] if name in values else request.getfixturevalue(name)
    case = Case(item.nodeid, item.path, test(**given))
    case.go_on(None)
    return case


def run_together(cases: list[Case]) -> None:
    """Take each of ``cases``, which need the same ranks, to what it waits for next."""
    while cases:
        on = cases[0].on
        assert on is not None
        # How many cases all ranks have finished, as far as each rank knows.
        finished = mmap.mmap(-1, on.num_ranks)
        try:
            limit = 60.0 + len(cases)
            packed = run_ranks(
                on.num_ranks, _each, cases, finished, timeout=limit, group=on.group, transport=on.transport
            )
        except RankError as error:
            case = cases.pop(min(*finished[:], len(cases) - 1))
            error.add_note(f"Others may have run before on the same ranks. It runs alone by: pytest '{case.name}'")
            case.go_on(error)
        else:
            for case, *answers in zip(cases, *packed, strict=True):
                case.go_on([torch.load(io.BytesIO(answer), weights_only=False) for answer in answers])
            return


def _each(rank: int, cases: list[Case], finished: mmap.mmap) -> list[bytes]:
    """On a rank: what each case returned, packed before the next one can change it."""
    packed = []
    environment = dict(os.environ)
    for position, case in enumerate(cases):
        on = case.on
        assert on is not None
        torch.manual_seed(1000 + rank)
        answer = io.BytesIO()
        torch.save(on.function(rank, *on.args), answer)
        packed.append(answer.getvalue())
        if on.group:
            dist.barrier()
        finished[rank] = position + 1
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
    return packed
