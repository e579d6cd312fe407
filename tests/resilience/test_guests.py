"""Who connects to the first host's launcher: greeted, refused, dropped, lost. Oracle: what each of them sends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onecopy.resilience import hosts as module
from onecopy.resilience.hosts import Hosts
from onecopy.resilience.lines import Lines, parse_endpoint
from onecopy.version import __version__


class _Idle:
    """In place of a zygote: nothing ever happens on this host."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def fileno(self) -> int:
        return self._reading

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextmanager
def _job(hosts: int = 2) -> Iterator[Hosts]:
    job = Hosts(_Idle(), ("127.0.0.1", 0), hosts, 2)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        job.close(7)


def _connect(job: Hosts, number: int, **other: object) -> Lines:
    lines = Lines(socket.create_connection(("127.0.0.1", job.port)))
    lines.send(**{"host": number, "hosts": 2, "ranks": 2, "version": __version__, **other})
    return lines


def _settle(job: Hosts) -> list[dict[str, Any]]:
    """What happens until nothing more does for a tenth of a second."""
    found: list[dict[str, Any]] = []
    quiet = 0
    while quiet < 5:
        came = job.answers(0.02)
        assert came is not None
        found += came
        quiet = 0 if came else quiet + 1
    return found


def test_what_is_to_start_waits_for_its_host_and_is_lost_with_it() -> None:
    with _job() as job:
        job.start("early", 1, {"A": "1"}, [])
        job.start("never", 1, {}, [])
        job.kill("never")
        assert _settle(job) == [{"process": "never", "code": -signal.SIGKILL}]
        assert set(job.missing()) == {1}
        guest = _connect(job, 1)
        _settle(job)
        assert job.missing() == {}
        job.start("late", 1, {}, [])
        job.kill("late", signal.SIGTERM)
        assert guest.read() == [
            {"start": "early", "environment": {"A": "1"}},
            {"start": "late", "environment": {}},
            {"kill": "late", "signal": signal.SIGTERM},
        ]
        guest.send(process="early", pid=5)
        guest.send(process="late", code=-signal.SIGTERM)
        guest.send(process="a stranger's", code=0)
        guest.send(signal=signal.SIGINT)
        assert _settle(job) == [
            {"process": "early", "pid": 5},
            {"process": "late", "code": -signal.SIGTERM},
            {"signal": signal.SIGINT},
        ]
        guest.close()
        assert _settle(job) == [{"lost": 1, "processes": ["early"]}]
        assert set(job.missing()) == {1}


def test_a_spare_host_takes_a_lost_ones_place_and_so_does_one_that_comes_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _job() as job:
        first, spare = _connect(job, 1), _connect(job, 2)
        assert _settle(job) == []
        first.close()
        assert _settle(job) == [{"lost": 1, "processes": []}]
        assert job.missing() == {}
        job.start("next", 1, {}, [])
        assert spare.read() == [{"start": "next", "environment": {}}]
        again = _connect(job, 1)
        _settle(job)
        assert "host 1 is there already: this launcher waits for the loss of a host" in capfd.readouterr().err
        spare.close()
        assert _settle(job) == [{"lost": 1, "processes": ["next"]}]
        job.start("last", 1, {}, [])
        assert again.read() == [{"start": "last", "environment": {}}]
        again.send(process="last", code=0)
        _settle(job)
    assert again.read() == [{"end": 7}]
    assert again.read() is None


@pytest.mark.parametrize(
    "other, words",
    [
        ({"hosts": 3}, "expected --nnodes 2, as on the first host; found 3"),
        ({"ranks": 4}, "expected --ranks 2, as on the first host; found 4"),
        ({"version": "0.0.0"}, f"expected version of onecopy {__version__}, as on the first host; found 0.0.0"),
        ({"host": 0}, "--node-rank 0: the first host has 0"),
        ({"host": "1"}, "--node-rank 1: the first host has 0"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused_in_words(other: dict[str, object], words: str) -> None:
    with _job() as job:
        guest = _connect(job, 1, **other)
        _settle(job)
        (refusal,) = guest.read() or [{}]
        assert words in refusal["refused"]
        assert guest.read() is None
        assert set(job.missing()) == {1}


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"[" * 70_000, b"{" * 40 + b"\n"])
def test_a_stranger_is_dropped_and_harms_nobody(said: bytes) -> None:
    with _job() as job, socket.create_connection(("127.0.0.1", job.port)) as stranger:
        guest = _connect(job, 1)
        stranger.sendall(said)
        assert _settle(job) == []
        assert stranger.recv(10) == b""
        assert job.missing() == {}
        guest.send()
        assert _settle(job) == []


def test_a_host_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.5)
    monkeypatch.setattr(module, "_A_GREETING", 0.3)
    with _job() as job, socket.create_connection(("127.0.0.1", job.port)):
        silent = _connect(job, 1)
        found: list[dict[str, Any]] = []
        until = time.monotonic() + 10
        while not found and time.monotonic() < until:
            found += job.answers(0.05) or []
        assert found == [{"lost": 1, "processes": []}]
        assert "host 1 is lost: it has not been heard of for" in capfd.readouterr().err
        silent.close()


@pytest.mark.parametrize("endpoint", ["", "here", ":5", "here:", "here:0", "here:65536", "here:five", "a:-5"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="such as node-0:29400"):
        parse_endpoint(endpoint)
    assert parse_endpoint("node-0:29400") == ("node-0", 29400)
