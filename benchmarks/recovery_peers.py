"""What peers do after the same kill in the same job, side by side: a GPT on 4 gloo ranks of this host.

    python benchmarks/recovery_peers.py --model 30m --losses 5
    python benchmarks/recovery_peers.py --only onecopy torchrun

onecopy     `onecopy run` with a mirror and a spare
torchrun    `torchrun` starts all ranks again; the script goes on from a checkpoint in /dev/shm, saved after every step

Of each: seconds from the kill to the first step that all ranks have made after it, and the time of a step, with what
the system does in every step so that it can go on. A spare costs memory in onecopy; torchrun has none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from recovery import LIMIT, RANKS, SURVIVOR, carry_out, parts_of
from trained.survivor import Plan

EVERY: Final = 8
"""Steps between two kills."""

IN_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Found:
    """What a system did.

    Attributes:
        seconds: from each kill to the first step that all ranks have made after it.
        step: seconds of a step, the median of the slowest rank.
    """

    seconds: list[float]
    step: float


def _plan(model: str, losses: int, *, save_every: int = 0) -> Plan:
    return Plan(
        steps=EVERY * losses,
        every=EVERY,
        model=model,
        kinds=("kill",),
        again=0.0,
        seed=11,
        save_every=save_every,
        mirror=not save_every,
    )


def onecopys(model: str, losses: int, folder: Path) -> Found:
    """`onecopy run`, the lost rank's states from its mirror."""
    ended = carry_out(_plan(model, losses), folder / "run", spares=1)
    seconds = [parts["in all"] for parts in parts_of(ended)]
    return Found(seconds, max(one["step"] for one in ended.resources))


def torchruns(model: str, losses: int, folder: Path) -> Found:
    """The same script under `torchrun`: all ranks again, from a checkpoint in memory."""
    folder = folder / "run"
    folder.mkdir()
    options = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={losses + 1}", "--monitor-interval=0.05"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SURVIVOR), str(folder)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    plan = json.dumps(asdict(_plan(model, losses, save_every=1)))
    with (folder / "output").open("w") as output:
        done = subprocess.run([*command, plan], env=environment, stdout=output, stderr=output, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"torchrun ended with {done.returncode}:\n{(folder / 'output').read_text()[-4000:]}")
    results = [json.loads(file.read_text())["resources"]["step"] for file in folder.glob("result-*.json")]
    seconds = _until_all_have_stepped(folder)
    return Found(seconds, max(results))


def _until_all_have_stepped(folder: Path) -> list[float]:
    """From each kill until as many processes as start again after it have made their first step."""
    firsts = sorted(json.loads(file.read_text())["stepped"] for file in folder.glob("first-*"))
    return [[first for first in firsts if first > kill][RANKS - 1] - kill for kill in _kills(folder)]


def _kills(folder: Path) -> list[float]:
    return sorted(json.loads(file.read_text())["time"] for file in folder.glob("lost-*"))


SYSTEMS: Final[dict[str, Callable[[str, int, Path], Found]]] = {
    "onecopy": onecopys,
    "torchrun": torchruns,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30m")
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    rows = {}
    for name in options.only:
        folder = Path(tempfile.mkdtemp(prefix="onecopy-recovery-", dir=IN_MEMORY))
        try:
            found = SYSTEMS[name](options.model, options.losses, folder)
        finally:
            shutil.rmtree(folder)
        rows[name] = asdict(found)
        print(
            f"{name:<12}{len(found.seconds)} kills: median {statistics.median(found.seconds):.2f} s, worst "
            f"{max(found.seconds):.2f} s; a step {found.step:.3f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "systems": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
