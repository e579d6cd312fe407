"""Client: starts the host of probes and asks it; a host that dies or is silent is replaced."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from onecopy.errors import SettingsError
from onecopy.tuner.probe.order import Order, Report
from onecopy.tuner.workload import Workload

_START: Final = 120.0
"""Seconds in which a host must have imported everything."""

_MARGIN: Final = 30.0
"""Seconds that a host gets beyond a probe's own limit before it is given up itself."""


class Host:
    """A process from which ranks are forked, see `host.py`.

    Args:
        threads: of each rank, which the process must be told before it imports anything.
    """

    def __init__(self, workload: Workload, threads: int) -> None:
        pickled = _pickled(workload)
        self._setup = {"workload": pickled, "path": list(sys.path), "main": _program(pickled)}
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None

    def probe(self, order: Order) -> list[Report]:
        """Carry out an order. Whatever becomes of it, each rank has a report."""
        process = self._start()
        try:
            _write(process, order)
            reports: list[Report] = self._read(process, order.limits.seconds + _MARGIN)
        except (OSError, EOFError, TimeoutError, pickle.UnpicklingError) as error:
            self.close()
            why = f"the process that forks ranks has ended: {type(error).__name__} {error}".strip()
            return [Report(rank, code=1, error=why) for rank in order.ranks]
        return reports

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        threads = str(self._threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
        # As `onecopy train` has it for its ranks: whole parameters come and go by the megabyte.
        environment |= {
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if sys.platform == "linux" and "WORLD_SIZE" not in os.environ:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Probes have a store of their own, which that of torchrun's agent is not to stand for.
        environment = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "onecopy.tuner.probe.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C is for the tuner, which ends its probes in its own time.
            start_new_session=True,
        )
        try:
            _write(self._process, self._setup)
            problem = self._read(self._process, _START)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise SettingsError(f"the process that forks probes could not start: {type(error).__name__}") from None
        if problem is not None:
            self.close()
            raise SettingsError(f"what is to be tuned cannot be imported in another process: {problem}")
        return self._process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        return pickle.load(process.stdout)

    def close(self) -> None:
        """End the host, and with it whatever it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                # What was on its way to a process that has ended is lost.
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(value))
    process.stdin.flush()


def _pickled(workload: Workload) -> bytes:
    try:
        return pickle.dumps(workload)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"probes run in processes of their own, which find functions by name: build, batches, optimizer and loss "
            f"must stand at the top of a module; {error}"
        ) from None


def _program(workload: bytes) -> str | None:
    """The file of the running program, if functions of the workload are in it, which pickles know as __main__."""
    if b"__main__" not in workload:
        return None
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        raise SettingsError(
            "probes run in processes of their own and cannot find functions that were typed into a session: put build "
            "and batches into a module"
        )
    return str(path)
