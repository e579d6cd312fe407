"""Ranks as forked children: `run_ranks(2, function)` calls ``function(rank)`` in two processes joined by gloo.

The parent has imported everything and runs no thread, so a child is ready in some 50 ms where a spawned one takes five
seconds. It never computes: what a test expects is computed in a child too. Results come back by value through pipes
that the parent reads all the time, so that a large one cannot block. Whatever happens, no child outlives the call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

everywhere = pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)])
"""Every stage on two ranks, and on three, which divide nothing, where something is sharded."""

every_stage = pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 3), (2, 2), (3, 3)])
"""Every stage once, for what depends on the number of ranks as `everywhere` has shown already."""

default_transport: str | None = None
"""What `run_ranks` takes where a test says nothing; a file whose ranks diverge sets it to either, in turn."""

GROUP_TIMEOUT = 25.0
"""Seconds until gloo gives a message up. Far above what any step here takes, below every test's own limit."""

Join = Callable[[int, int, Path, float], None]
"""Makes the process group of a rank."""

_CROSSED = "Gloo connectFullMesh failed"
"""A rank that connects may come to a port which another test's rank, in another process, had until then."""

_OWN_THREADS = 2 if "PYTEST_XDIST_WORKER" in os.environ else 1
"""Of a process that runs tests: a worker of pytest-xdist has one that waits for the next order, and holds no lock."""

_GRACE = 6.0
"""Seconds that the other ranks get to end by themselves once one has failed."""


class RankError(AssertionError):
    """A rank failed, died or did not finish. The message holds its traceback."""


@dataclass
class _Child:
    rank: int
    pid: int
    results: int
    release: int
    trace: Path
    received: bytearray = field(default_factory=bytearray)
    answer: dict[str, Any] | None = None
    status: int | None = None
    closed: bool = False

    def stack(self) -> str:
        """Where the child was, down to the function under test."""
        lines = self.trace.read_text().splitlines()
        ours = [i for i, line in enumerate(lines) if "ranks.py" in line and line.endswith("in _child")]
        return "\n".join(lines[: ours[0]] if ours else lines)


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    group_timeout: float = GROUP_TIMEOUT,
    transport: str | None = None,
    join: Join | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``num_ranks`` forked ranks.

    Args:
        function: may be a closure; it reaches the children by the fork, its results come back pickled.
        timeout: seconds after which every child is killed.
        group: False starts no process group, as in a plain ``python`` run (one rank only).
        group_timeout: seconds until a message that nobody answers fails.
        transport: "memory", as between ranks on one machine, or "sockets", as between machines. None takes sockets
            for three ranks and memory for other numbers, so that the suite has both.
        join: makes the process group, called with rank, number of ranks, a file for a store and ``group_timeout``.
            None joins on gloo.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: with the traceback of the rank that failed first, or the stacks of those that were still running.
    """
    __tracebackhide__ = True
    assert group or num_ranks == 1, "without a process group there is one rank"
    transport = transport or default_transport
    memory = transport == "memory" if transport else num_ranks != 3
    join = join or partial(_join, memory)
    threads = _count_threads(patience=5.0)
    assert threads == _OWN_THREADS, f"the parent of forked ranks runs {threads} threads: compute in a rank instead"
    sys.stdout.flush()
    sys.stderr.flush()
    for is_last in (False, True):
        with tempfile.TemporaryDirectory(prefix=f"onecopy-ranks-{os.getpid()}-") as folder:
            children: list[_Child] = []
            try:
                # A child's garbage collector would otherwise write to every object here, and so copy all its memory.
                gc.freeze()
                for rank in range(num_ranks):
                    size = num_ranks if group else 0
                    children.append(_fork(rank, size, function, args, Path(folder), group_timeout, join, children))
                gc.unfreeze()
                failure = _collect(children, time.monotonic() + timeout)
                if failure is None:
                    return [child.answer["result"] for child in children if child.answer]
                if is_last or _CROSSED not in failure:
                    raise RankError(failure)
            finally:
                _end(children)
    raise AssertionError("the second attempt returns or raises")


def _collect(children: list[_Child], deadline: float) -> str | None:
    """Read until every rank has answered. Returns what went wrong first, None if nothing did."""
    start = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.results, selectors.EVENT_READ, child)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                child = key.data
                piece = os.read(child.results, 1 << 20)
                child.received += piece
                if not piece:
                    child.closed = True
                    child.answer = _answer(child)
                    selector.unregister(child.results)
                    if child.answer is None or "error" in child.answer:
                        deadline = min(deadline, time.monotonic() + _GRACE)
            if not ready and time.monotonic() >= deadline:
                break
    running = [child for child in children if not child.closed]
    silent = [child for child in children if child.closed and child.answer is None]
    failed = [child for child in children if child.answer is not None and "error" in child.answer]
    if failed or silent:
        return _describe(failed, silent, running)
    return _describe_hang(running, time.monotonic() - start) if running else None


def _answer(child: _Child) -> dict[str, Any] | None:
    """What the child sent, None if it died before it had sent all."""
    try:
        return torch.load(io.BytesIO(bytes(child.received)), weights_only=False)  # type: ignore[no-any-return]
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        return None


def _describe(failed: list[_Child], silent: list[_Child], running: list[_Child]) -> str:
    answers = sorted(((c.answer or {})["time"], c.rank, (c.answer or {})["error"]) for c in failed)
    others = [f"rank {child.rank} was still running and was killed" for child in running]
    if silent:
        first = silent[0]
        _, first.status = os.waitpid(first.pid, 0)
        how = f"exit code {os.waitstatus_to_exitcode(first.status)}"
        if os.WIFSIGNALED(first.status):
            how = signal.Signals(os.WTERMSIG(first.status)).name
        others += [f"rank {rank} failed too:\n{error}" for _, rank, error in answers]
        return "\n".join([f"rank {first.rank} died ({how}):", first.stack(), *others])
    (_, rank, error), *later = answers
    others += [f"rank {rank} failed after it: {error.strip().splitlines()[-1]}" for _, rank, error in later]
    return "\n".join([f"rank {rank} failed:", error, *others])


def _describe_hang(running: list[_Child], seconds: float) -> str:
    for child in running:
        os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.3)
    ranks = ", ".join(str(child.rank) for child in running)
    stacks = [f"--- rank {child.rank}\n{child.stack()}" for child in running]
    return "\n".join([f"after {seconds:.0f} s these ranks were still running: {ranks}", *stacks])


def _end(children: list[_Child]) -> None:
    for child in children:
        os.close(child.release)
        os.close(child.results)
    for child in children:
        if child.status is None and not child.closed:
            # It may have ended by itself meanwhile; a zombie takes the signal without complaint.
            os.kill(child.pid, signal.SIGKILL)
    for child in children:
        if child.status is None:
            _, child.status = os.waitpid(child.pid, 0)


# --- in the child


def _fork(
    rank: int,
    num_ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: Path,
    group_timeout: float,
    join: Join,
    earlier: list[_Child],
) -> _Child:
    results, write_results = os.pipe()
    wait_release, release = os.pipe()
    trace = folder / f"rank{rank}.txt"
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for end in (results, release, *(end for child in earlier for end in (child.results, child.release))):
            os.close(end)
        _child(rank, num_ranks, function, args, trace, parent, group_timeout, join, write_results, wait_release)
    os.close(write_results)
    os.close(wait_release)
    return _Child(rank, pid, results, release, trace)


def _child(
    rank: int,
    num_ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    trace: Path,
    parent: int,
    group_timeout: float,
    join: Join,
    results: int,
    release: int,
) -> NoReturn:
    status = 1
    try:
        _die_with(parent)
        log = trace.open("w")
        faulthandler.enable(file=log)
        faulthandler.register(signal.SIGUSR1, file=log)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        torch.set_num_threads(1)
        torch.manual_seed(1000 + rank)
        answer: dict[str, Any]
        try:
            if num_ranks:
                join(rank, num_ranks, trace.parent / "store", group_timeout)
            answer = {"result": function(rank, *args)}
            status = 0
        except BaseException:
            answer = {"error": traceback.format_exc(), "time": time.monotonic()}
        sys.stdout.flush()
        sys.stderr.flush()
        _send(results, answer)
        if status == 0:
            # A rank that leaves closes its connections, and its peers would report that instead of their own error.
            os.read(release, 1)
    finally:
        os._exit(status)


def _join(memory: bool, rank: int, num_ranks: int, path: Path, group_timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["ONECOPY_CROSS_MEMORY"] = "1" if memory else "0"
    # Public code reads these; torch itself needs only the store.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    store = dist.FileStore(str(path), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=group_timeout)
    )


def _count_threads(patience: float) -> int:
    """This process's threads. One that is just ending, such as a closed browser's, gets ``patience`` seconds for it."""
    if sys.platform != "linux":
        return _OWN_THREADS
    deadline = time.monotonic() + patience
    while (threads := len(os.listdir("/proc/self/task"))) > _OWN_THREADS and time.monotonic() < deadline:
        time.sleep(0.05)
    return threads


def _send(results: int, answer: dict[str, Any]) -> None:
    payload = io.BytesIO()
    try:
        torch.save(answer, payload)
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError):
        text = f"its result cannot be sent by value:\n{traceback.format_exc()}"
        payload = io.BytesIO()
        torch.save({"error": text, "time": time.monotonic()}, payload)
    with os.fdopen(results, "wb") as pipe:
        pipe.write(payload.getvalue())


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, even by a signal that the parent cannot catch."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
