"""Take every figure of the docs anew, and write their tables from the results.

    python benchmarks/retake.py --list
    sudo python benchmarks/retake.py
    sudo python benchmarks/retake.py --group traffic rates
    sudo python benchmarks/retake.py --only compare_llama_2

Each step is one command, whose results go to `results/`. A step that fails or passes its limit is named, its results of
before stay, and the others go on. At the end `tables.py` and `pictures.py` write the docs. Peers take part where the
Python that runs this has them. On a quiet machine of 2 cores it is to take 20 minutes. Three groups are taken by name
only: `traffic`, the bytes that every system sends, and `rates`, which times steps on slow links: some 5 minutes each;
and one of 4 minutes, `recovery`, the times from a loss of ranks to the next step.
Root is needed for namespaces: without it, bytes on the wire are left out, and those two fail.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"


@dataclass(frozen=True)
class Step:
    """A command and its file of results.

    Attributes:
        group: what it is about.
        line: the script and its options, without `--json`.
        limit: seconds.
    """

    name: str
    group: str
    line: str
    limit: float = 300.0

    @property
    def command(self) -> str:
        """As it is typed, from the repository's root."""
        return f"python benchmarks/{self.line} --json benchmarks/results/{self.name}.json"


_FLOOR: Final = "no communication"


def _compare(name: str, options: str, *only: str) -> Step:
    """Times of all systems, or of some; always with the floor."""
    chosen = f" --only {shlex.join((*only, _FLOOR))}" if only else ""
    return Step(name, "times", f"compare.py {options} --warmup 1 --no-memory --no-overhead{chosen}")


_TORCHS: Final = ("DDP", "DDP + ZeroRedundancyOptimizer", "fully_shard, reshard_after_forward=True")
_OURS: Final = ("onecopy stage 1", "onecopy stage 2", "onecopy stage 3")

STEPS: Final = (
    _compare("compare_gpt30m_2", "--case gpt-30m --steps 12"),
    _compare(
        "compare_gpt30m_4",
        "--case gpt-30m --ranks 4 --steps 6",
        *(*_TORCHS, *_OURS, "DeepSpeed stage 2", "DeepSpeed stage 3"),
    ),
    _compare("compare_gpt30m_2_g4", "--case gpt-30m --micro-batches 4 --size 32 --samples 1 --steps 5"),
    _compare(
        "compare_gpt30m_4_g4",
        "--case gpt-30m --ranks 4 --micro-batches 4 --size 32 --samples 1 --steps 4",
        *(*_TORCHS, *_OURS),
    ),
    # All systems live in the same processes: of this model no more fit into 24 GB.
    _compare("compare_gpt120m_2", "--case gpt-120m --size 32 --samples 1 --steps 6", *_TORCHS, *_OURS[1:]),
    _compare("compare_llama_2", "--case llama --steps 8"),
    _compare("compare_llama_2_bf16", "--case llama --precision bf16 --steps 6", *_TORCHS, *_OURS),
    _compare("compare_llama_4", "--case llama --ranks 4 --steps 6", *_TORCHS, *_OURS),
    _compare("compare_resnet50_2", "--case resnet50 --steps 8"),
    _compare("compare_resnet50_4", "--case resnet50 --ranks 4 --steps 6", *_TORCHS, *_OURS),
    _compare("compare_lora_2", "--case lora --size 64 --steps 8"),
    _compare("compare_gpt3m_2_bf16", "--case gpt-3m --precision bf16 --size 8 --samples 1 --steps 8"),
    # DeepSpeed's stage 3 takes a quarter of a minute for a step of this one.
    _compare("compare_narrow_2", "--case narrow --steps 8", *_TORCHS, *_OURS),
    Step(
        *("compare_gpt30m_2_memory", "memory"),
        "compare.py --case gpt-30m --size 64 --steps 0 --warmup 1 --no-overhead",
        limit=400.0,
    ),
    Step("memory", "memory", "memory.py --ranks 1 2 4 --tied 1 2", limit=400.0),
    Step(
        "overhead",
        "engine",
        "overhead.py --kind linear --ranks 8 64 1024 --layers 25 50 100 --passes 5 --group silent",
    ),
    Step("ledger_cost", "engine", "ledger_cost.py"),
    Step("timelines", "engine", "timelines.py"),
    Step(
        *("scaling", "engine"),
        "scaling.py --ranks 8 64 512 4096 --layers 10 --html benchmarks/results/scaling.html",
    ),
    Step("recovery_times", "recovery", "recovery.py times --model small 30m", limit=600.0),
    Step("wire", "traffic", "wire.py", limit=900.0),
    Step(
        *("wire_rates", "rates"),
        "wire.py --rate 1gbit 300mbit 100mbit --ranks 2 --micro-batches 1 --precision fp32 --batch 2 --length 128 "
        "--steps 5",
        limit=600.0,
    ),
)
GROUPS: Final = tuple(dict.fromkeys(step.group for step in STEPS))


def take(step: Step, log: Path) -> str:
    """Run a step; what became of it, in words."""
    output = log / f"{step.name}.txt"
    began = monotonic()
    with output.open("w") as lines:
        try:
            code = subprocess.run(
                [sys.executable, *shlex.split(step.command)[1:]],
                cwd=HERE.parent,
                stdout=lines,
                stderr=subprocess.STDOUT,
                timeout=step.limit,
            ).returncode
            outcome = "done" if code == 0 else f"FAILED with {code}, see {output}"
        except subprocess.TimeoutExpired:
            outcome = f"STOPPED after its limit of {step.limit:.0f} s, see {output}"
    return f"{step.name}: {monotonic() - began:.0f} s, {outcome}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=["times", "memory", "engine"])
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--log", type=Path, help="folder for what the steps print; a new one in /tmp if not given")
    parser.add_argument("--no-docs", action="store_true", help="leave the docs as they are")
    options = parser.parse_args()
    chosen = [step for step in STEPS if (step.name in options.only if options.only else step.group in options.group)]
    if options.list:
        for step in chosen:
            print(f"{step.group:<8} {step.command}")
        return
    log = options.log or Path(tempfile.mkdtemp(prefix="onecopy-retake-"))
    log.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    for step in chosen:
        print(take(step, log), flush=True)
    print(f"{monotonic() - began:.0f} s in all")
    if not options.no_docs:
        # In a process of its own, for its imports are not needed to take figures.
        for script in ("tables.py", "pictures.py"):
            subprocess.run([sys.executable, str(HERE / script)], check=True)


if __name__ == "__main__":
    main()
