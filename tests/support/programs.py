"""Programs that end as programs do, without importing torch anew for each.

Ranks of `run_ranks` leave by `os._exit`. Here one fresh interpreter imports torch and onecopy, and forks for every
program; the fork goes on to the interpreter's own end: of the file, of an error that nobody catches, or of `sys.exit`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_INTERPRETER = """
import gc, json, os, sys, torch, torch._dynamo, torch.distributed.tensor, onecopy

assert all(getattr(onecopy, name) for name in onecopy.__all__)
gc.freeze()
for line in sys.stdin:
    children = []
    for place, environment, arguments in json.loads(line):
        children.append(os.fork())
        if not children[-1]:
            break
    if not children[-1]:
        break
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
else:
    sys.exit()
os.environ.update(environment)
sys.argv = arguments
for number, name in ((1, "output"), (2, "errors")):
    os.dup2(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT), number)
exec(compile(open(arguments[0]).read(), arguments[0], "exec"), {"__name__": "__main__"})
"""

LIMIT = 50.0
"""Seconds that the programs may take."""


class Programs:
    """Runs programs; made by `interpreter`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path
    ) -> tuple[list[int], list[str], list[str]]:
        """Codes, outputs and errors of a program that runs once with each of ``environments``, at the same time."""
        places = [folder / f"process-{number}" for number in range(len(environments))]
        for place in places:
            place.mkdir()
        orders = [
            (str(place), dict(environment), list(arguments))
            for place, environment in zip(places, environments, strict=True)
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], LIMIT)[0], f"no end within {LIMIT} s"
        codes = json.loads(self._process.stdout.readline())
        outputs, errors = ([(place / name).read_text() for place in places] for name in ("output", "errors"))
        return codes, outputs, errors


@contextmanager
def interpreter() -> Iterator[Programs]:
    """An interpreter for as long as the block lasts; whatever it runs ends with it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERPRETER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )
    try:
        yield Programs(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
