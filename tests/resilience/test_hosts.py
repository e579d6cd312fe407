"""`onecopy run` on several hosts, which are launchers on this one. Oracle: the same script without a loss."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from onecopy.sharding.model import discover
from ranks import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find launchers and what they leave"),
]

_SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import onecopy

folder, how = Path(sys.argv[1]), sys.argv[2]
onecopy.join(timeout=30)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Dropout(0.2), torch.nn.Linear(9, 8))
onecopy.shard(model, 3, mirror=True)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
run = onecopy.resilient(model, optimizer)


def once(name):
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def launcher():
    return parent(os.getppid())


for number in run.loop(lambda step: range(step, 12)):
    with run:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).pow(2).mean().backward()
        if how != "none" and (rank, number) in ((1, 2), (2, 4)) and once(f"lost-{rank}"):
            os.kill(os.getpid(), signal.SIGKILL)
        victim = {"host": 3, "first host": 0}.get(how)
        if rank == victim and number == 7 and once("lost-host"):
            (folder / "time").write_text(str(time.time()))
            os.kill(launcher(), signal.SIGKILL)
            time.sleep(60)
        run.step()
run.check()
own = [v.local.tolist() for state in optimizer.state.values() for v in state.values() if hasattr(v, "local")]
with torch.no_grad(), onecopy.gathered(model):
    weights = [parameter.tolist() for parameter in model.parameters()]
(folder / f"result-{rank}.json").write_text(json.dumps([run.steps, weights, own, torch.rand(1).item()]))
if "LOCAL_RANK" in os.environ and how != "none":
    (folder / f"place-{rank}.json").write_text(json.dumps([os.environ["LOCAL_RANK"], launcher()]))
"""


@contextmanager
def _hosts(
    folder: Path, how: str, *numbers: int, transport: str = "memory", patience: float = 60.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """A launcher for each number of a host, of two with two ranks. None of their processes may outlive them."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--ranks=2", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", f"--join-timeout={patience}"]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "ONECOPY_CROSS_MEMORY": "1" if transport == "memory" else "0",
        "OWNER": str(folder),
    }
    command = [sys.executable, "-m", "onecopy.cli.main", "run", *options]
    launchers = []
    for place, number in enumerate(numbers):
        with (folder / f"said-{place}").open("w") as said:
            launchers.append(
                subprocess.Popen(
                    [*command, f"--node-rank={number}", str(script), str(folder), how],
                    env=environment,
                    stdout=said,
                    stderr=said,
                    text=True,
                )
            )
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    until = time.monotonic() + 10
    while (left := _processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def _processes_of(folder: Path) -> list[str]:
    """The running processes that have the folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_dead and f"OWNER={folder}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


def _said(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("said-*"))]


def _results(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("result-*.json"))]


def _be(rank: int, folder: Path) -> None:
    """Run the script on a rank that nobody has to launch."""
    sys.argv = ["script.py", str(folder), "none"]
    runpy.run_path(str(folder / "script.py"), run_name="__main__")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Results of four ranks that lose nothing."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "script.py").write_text(_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        # As in a process of its own, or slices would be cut elsewhere.
        patch.setattr(discover, "SMALL_BYTES", 2**18)
        run_ranks(4, _be, folder)
    found = _results(folder)
    assert len(found) == 4
    return found


@pytest.mark.parametrize("transport", ["memory", "sockets"])
def test_ranks_of_two_hosts_and_then_a_whole_host_change_no_bit(
    tmp_path: Path, transport: str, expected: list[str]
) -> None:
    """Rank 1, then rank 2, each replaced on its own host; then the second host, whose place a spare host takes."""
    folder = tmp_path / "run"
    with _hosts(folder, "host", 0, 1, 2, transport=transport) as launchers:
        codes = [launcher.wait(timeout=300) for launcher in launchers]
        said = _said(folder)
        assert codes == [0, -signal.SIGKILL, 0], said
        places = [json.loads((folder / f"place-{rank}.json").read_text()) for rank in range(4)]
        pids = [launcher.pid for launcher in launchers]
        assert places == [["0", pids[0]], ["1", pids[0]], ["0", pids[2]], ["1", pids[2]]]
    assert _results(folder) == expected, said
    assert "rank 1 ended by SIGKILL" in said[0]
    assert "rank 2 ended by SIGKILL" in said[0]
    assert "host 1 is lost" in said[0]
    assert "ranks 2, 3 ended with host 1; other processes take their places" in said[0]
    assert "begin again" not in said[0]


def test_a_host_that_does_not_come_back_is_named_within_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _hosts(folder, "host", 0, 1, patience=8.0) as launchers:
        first, second = launchers
        assert second.wait(timeout=300) == -signal.SIGKILL, _said(folder)
        assert first.wait(timeout=60) == 1
        waited = time.time() - float((folder / "time").read_text())
        assert 8 < waited < 60
    assert "host 1 has not been there for 8 s (--join-timeout): giving up" in _said(folder)[0]


def test_with_the_first_host_all_end_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _hosts(folder, "first host", 0, 1) as launchers:
        first, second = launchers
        assert first.wait(timeout=300) == -signal.SIGKILL, _said(folder)
        assert second.wait(timeout=20) == 1
    said = _said(folder)[1]
    assert re.search(r"the launcher of the first host, at 127\.0\.0\.1:\d+, has ended or is lost", said), said
    assert "goes on from the newest checkpoint" in said


def test_hosts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, words in (
            (["--nnodes=2"], "--nnodes above 1 and --rdzv-endpoint HOST:PORT belong together"),
            (["--node-rank=1"], "--node-rank 1 needs --nnodes above 1"),
            (["--nnodes=2", "--rdzv-endpoint=here"], "--rdzv-endpoint is host:port"),
            (["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}"], f"host 0 cannot listen at 127.0.0.1:{port}"),
        ):
            command = [sys.executable, "-m", "onecopy.cli.main", "run", *options, str(script)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
