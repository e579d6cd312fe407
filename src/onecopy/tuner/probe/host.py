"""Host: a process that has imported everything and computes nothing, from which each probe's ranks are forked.

A rank is there within a tenth of a second, where a new interpreter would import for several. The host reads what its
ranks say, ends those that are silent or late, and has the kernel's count of each one's memory. It is started by
`client.py`, which reads its answers. If the client goes, the host and its ranks go too; if the host dies, so do they.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import runpy
import selectors
import signal
import sys
import tempfile
import time
import types
from dataclasses import fields
from typing import IO, Any, Final, NoReturn

from onecopy.tuner.probe.groups import Group, make_group
from onecopy.tuner.probe.order import Order, Report
from onecopy.tuner.probe.rank import run
from onecopy.tuner.workload import Workload

_GRACE: Final = 2.0
"""Seconds that other ranks get to say what they saw once one has failed."""

_TAIL: Final = 2000
"""Characters of what ranks printed that go into a report."""


def serve() -> None:
    """Answer orders until nobody asks."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a user's code prints is no answer.
    os.dup2(2, 1)
    setup = pickle.load(questions)
    try:
        workload = _prepare(setup)
    except BaseException as error:
        _answer(answers, f"{type(error).__name__}: {error}")
        return
    _answer(answers, None)
    while True:
        try:
            order: Order = pickle.load(questions)
        except EOFError:
            return
        _answer(answers, _probe(workload, order, questions))


def _answer(answers: IO[bytes], value: Any) -> None:
    pickle.dump(value, answers)
    answers.flush()


def _prepare(setup: dict[str, Any]) -> Workload:
    """Import what probes need, the user's modules first."""
    sys.path[:] = setup["path"]
    if setup["main"] is not None:
        # Functions of the program itself are found where they were: in a module called __main__.
        main = types.ModuleType("__main__")
        main.__dict__.update(runpy.run_path(setup["main"], run_name="__onecopy_probe__"))
        sys.modules["__main__"] = main
    workload: Workload = pickle.loads(setup["workload"])
    # The first step of an optimizer would load torch's compiler in every rank.
    for name in ("torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(name)
    workload.warm()
    gc.collect()
    gc.freeze()
    return workload


class _Child:
    """A rank, as its host sees it."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        self.report = Report(rank)
        self.pid = pid
        self.pipe = pipe
        self.heard = time.monotonic()
        self.failed_for_peer = False
        self._rest = b""

    def read(self) -> bool:
        """Take in what it has said. Returns whether it may say more."""
        piece = os.read(self.pipe, 1 << 16)
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            values = json.loads(line)
            self.failed_for_peer |= values.pop("peer", False)
            if "seconds" in values:
                self.report.steps.append(values.pop("seconds"))
            for name, value in values.items():
                if name in _FIELDS:
                    setattr(self.report, name, value)
        return bool(piece)

    @property
    def failed(self) -> bool:
        return self.report.error is not None


_FIELDS: Final = {field.name for field in fields(Report)}


def _probe(workload: Workload, order: Order, questions: IO[bytes]) -> list[Report]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        group = make_group(order.limits, len(order.ranks))
        children: list[_Child] = []
        try:
            for place in range(len(order.ranks)):
                children.append(_fork(workload, order, place, printed.fileno(), group, children))
            _watch(children, order, questions)
        finally:
            for child in children:
                _end(child, order)
            ended_by_system = group.ran_out() if group else False
            if group is not None:
                group.remove()
        printed.seek(0, os.SEEK_END)
        printed.seek(max(0, printed.tell() - _TAIL))
        tail = printed.read()
    for child in children:
        report = child.report
        killed = report.code == -signal.SIGKILL and report.ended == "itself"
        # Where nothing else was watching, a SIGKILL from outside is the system's, which has run out of memory.
        report.memory |= killed and (group is None or ended_by_system)
        if report.error is None and report.code and report.ended == "itself":
            how = f"ended by {signal.Signals(-report.code).name}" if report.code < 0 else f"exit code {report.code}"
            report.error, report.traceback = how, tail
        if child.failed_for_peer:
            report.ended = "peers"
    return [child.report for child in children]


def _fork(
    workload: Workload, order: Order, place: int, printed: int, group: Group | None, earlier: list[_Child]
) -> _Child:
    reading, writing = os.pipe()
    host = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(order.ranks[place], pid, reading)
    others = [reading, *(child.pipe for child in earlier)]
    return _be_a_rank(workload, order, place, writing, printed, group, host, others)


def _be_a_rank(
    workload: Workload,
    order: Order,
    place: int,
    pipe: int,
    printed: int,
    group: Group | None,
    host: int,
    others: list[int],
) -> NoReturn:
    code = 1
    try:
        _die_with(host)
        os.setsid()
        for end in others:
            os.close(end)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if group is not None:
            group.enter(place)
        code = run(workload, order, place, pipe)
    finally:
        # Past destructors, which may wait for ranks that are gone.
        os._exit(code)


def _die_with(host: int) -> None:
    """Ask the kernel to end this process when the host ends, even by a signal that cannot be caught."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != host:
            os._exit(1)


def _watch(children: list[_Child], order: Order, questions: IO[bytes]) -> None:
    """Listen until all have ended, or no more is to be waited for."""
    began = time.monotonic()
    patience = None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        # Nothing is asked while a probe runs: what can be read is the end.
        selector.register(questions, selectors.EVENT_READ, None)
        while len(selector.get_map()) > 1:
            ready = selector.select(0.1)
            for key, _ in ready:
                if key.data is None:
                    for child in children:
                        _kill(child)
                    os._exit(1)
                if not key.data.read():
                    selector.unregister(key.fd)
                    if key.data.failed or not key.data.report.metered:
                        patience = patience or time.monotonic() + _GRACE
            now = time.monotonic()
            running = [child for child in children if child.pipe in selector.get_map()]
            if patience is not None and now > patience:
                reason = "peers"
            elif running and now - max(child.heard for child in children) > order.limits.silence:
                reason = "silence"
            elif now - began > order.limits.seconds:
                reason = "time"
            else:
                continue
            for child in running:
                child.report.ended = reason  # type: ignore[assignment]
            return


def _kill(child: _Child) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It may not have a group of its own yet.
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _end(child: _Child, order: Order) -> None:
    """See that it has ended; what it left, and the kernel's count of its memory."""
    if child.report.ended != "itself":
        _kill(child)
    _, status, used = os.wait4(child.pid, 0)
    while child.read():
        pass
    os.close(child.pipe)
    child.report.code = os.waitstatus_to_exitcode(status)
    if order.device == "cpu":
        child.report.peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    # Not this module under another name, for orders are found by theirs.
    importlib.import_module("onecopy.tuner.probe.host").serve()
