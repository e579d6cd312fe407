"""Zygote: a process that has imported everything and forks ranks, so that one is there in milliseconds.

It runs no thread and no autograd, after which no fork would be safe. The launcher writes one line of JSON for each
process that it wants and reads one for each that has begun or ended. Forked processes end when the zygote does, and the
zygote when the launcher does, whatever ended it.

    launcher ──{"process", "environment", "arguments"}──▶ zygote ──fork──▶ the user's script, as `python script` runs it
             ◀──{"process", "pid"} … {"process", "code"}──
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.testing._internal.distributed.fake_pg

import onecopy.resilience.resilient
import onecopy.sharding.setup.whole  # noqa: F401  (a script is likely to ask for it)
from onecopy.resilience.membership import membership

_SET_DEATH_SIGNAL: Final = 1
"""`PR_SET_PDEATHSIG` of <sys/prctl.h>."""


def _warm_up() -> None:
    """Import what a script would import up to its first step, some of which torch imports in that."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(8))
    parameter.grad = torch.zeros(8)
    for options in ({"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW([parameter], **options)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.state_dict()
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    torch.amp.GradScaler("cpu")
    gc.collect()
    gc.freeze()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _serve(orders: int, answers: int) -> dict[str, Any] | None:
    """Fork what is asked for. Returns the order in the forked process, None at the end in the zygote itself."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The launcher decides when all end.
        signal.signal(number, signal.SIG_IGN)
    running: dict[int, str] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([orders, wake], [], [])
        if wake in ready:
            with suppress(BlockingIOError):
                os.read(wake, 4096)
            for pid in list(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    _answer(answers, process=running.pop(pid), code=os.waitstatus_to_exitcode(status))
        if orders not in ready:
            continue
        came = os.read(orders, 1 << 16)
        if not came:
            return None
        *lines, pending = (pending + came).split(b"\n")
        for line in lines:
            order = json.loads(line)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _die_with_parent()
                if os.getppid() != parent:
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                for end in (orders, answers, wake, woken):
                    os.close(end)
                return dict(order)
            running[pid] = order["process"]
            _answer(answers, process=order["process"], pid=pid)


def _answer(answers: int, **what: object) -> None:
    os.write(answers, (json.dumps(what) + "\n").encode())


def _run(order: dict[str, Any]) -> None:
    """Be the process that was asked for: run the script, and tell how it ended."""
    os.environ.update(order["environment"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    member = membership()
    assert member is not None
    module, script, *arguments = order["arguments"]
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            _leave(end.code)
    except BaseException:
        with suppress(RuntimeError):
            member.fail(traceback.format_exc())
        sys.excepthook(*sys.exc_info())
        _leave(1)
    member.end_well()


def _leave(code: object) -> NoReturn:
    """End as the interpreter does, but past destructors, which may wait for ranks that are gone."""
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    """Be a zygote, or what it has forked; descriptors of the launcher's pipes are the arguments."""
    _die_with_parent()
    orders, answers = map(int, sys.argv[1:3])
    _warm_up()
    _answer(answers, ready=True)
    if (order := _serve(orders, answers)) is not None:
        _run(order)


if __name__ == "__main__":
    main()
