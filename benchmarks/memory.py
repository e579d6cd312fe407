"""Memory: the meter beside ZeRO's formulas, beside torch's own count of tensors, and beside what the process held.

    python benchmarks/memory.py --ranks 1 2 4

A GPT of 33.7 M parameters computes in bf16 over fp32 masters with AdamW. Each case runs alone, in ranks of its own:

1. a GPT of one layer is trained for two steps and let go: pages of code, threads and kernels' scratch are there then,
   and are no model's (*own*);
2. the model takes two steps, then one in which everything is counted: the meter (with `onecopy.profile`, which adds
   activations), and the resident set's peak over what it was before the model was made. malloc maps every larger block
   by itself, so that the resident set rises and falls with the tensors;
3. once more from the start, under torch's profiler, which counts every tensor that is allocated (`allocated.py`).

The head has a weight of its own, for of a tied one autograd holds two gradients while it adds them, and the meter
counts what the engine holds. `--tied` shows how much that is: torch's count less the meter's.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import onecopy
from harness.allocated import peak_of_last
from harness.forks import run_ranks
from harness.process import own_peak, restart_peak, return_freed_memory, status_bytes
from onecopy.observe.meter import Meter
from onecopy.planner.formulas.memory import model_state_bytes
from trained.cases import SHAPES
from trained.gpt import GPT, Shape

STATES: Final = ("parameters_sliced", "parameters_gathered", "gradients_sliced", "optimizer")
EXPLAINED: Final = 0.97
"""What the meter is to explain of the resident peak at the least."""

_MIB: Final = 2**20


@dataclass(frozen=True)
class Case:
    """What is trained; ``tied``: the head's weight is the embedding's."""

    stage: int
    precision: str
    tokens: int
    tied: bool = False


def build(shape: Shape, tied: bool) -> GPT:
    """A GPT whose head is its own, unless tied."""
    net = GPT(shape)
    if not tied:
        net.head.weight = nn.Parameter(net.tokens.weight.detach().clone())
    return net


class Trainer:
    """Steps of a model on one batch."""

    def __init__(self, rank: int, shape: Shape, case: Case) -> None:
        torch.manual_seed(0)
        self.model = onecopy.shard(build(shape, case.tied), case.stage, precision=case.precision)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(rank)
        self._batch = torch.randint(0, shape.vocabulary, (1, case.tokens + 1), generator=generator)

    @property
    def meter(self) -> Meter:
        return onecopy.meter(self.model)

    def step(self) -> dict[str, int]:
        """What the meter counts while gradients are still there."""
        self.model(self._batch[:, :-1], self._batch[:, 1:]).backward()
        self._optimizer.step()
        held = dict(self.meter.live)
        self._optimizer.zero_grad()
        return held

    def counted(self) -> tuple[dict[str, int], dict[str, int]]:
        """One step: what it held at its end, and the meter's peak with activations."""
        self.meter.reset_peaks()
        with onecopy.profile(self.model):
            held = self.step()
        return held, self.meter.peak


def measure(rank: int, write: Callable[[str], None], case: Case) -> None:
    """Write this rank's bytes as a line of JSON."""
    return_freed_memory()
    bare, shape = status_bytes("RssAnon"), SHAPES["30m"]
    _first(rank, case)
    before = status_bytes("RssAnon")
    trainer = Trainer(rank, shape, case)
    for _ in range(2):
        trainer.step()
    gc.collect()
    dist.barrier()
    restart_peak()
    held, peak = trainer.counted()
    resident = own_peak() - before
    padded = onecopy.padded_numel(trainer.model)
    del trainer
    gc.collect()

    def make() -> Callable[[], dict[str, int]]:
        again = Trainer(rank, shape, case)
        again.step()
        dist.barrier()
        return lambda: again.counted()[1]

    allocated, metered = peak_of_last(make)
    dist.barrier()
    answer = {"held": held, "peak": peak, "resident": resident, "own": before - bare, "padded": padded}
    # Communication buffers lie in an arena, which torch does not allocate.
    named = sum(metered.values()) - metered["communication"]
    write(json.dumps({**answer, "allocated": allocated, "metered": named}))


def _first(rank: int, case: Case) -> None:
    """A small model's steps, which leave to the process what is its own."""
    small = Trainer(rank, replace(SHAPES["30m"], layers=1), case)
    for _ in range(2):
        small.counted()
    del small
    gc.collect()


HEADS: Final = (
    *("stage", "N", "held", "paper", "", "peak", "torch's count", "counted", "resident", "explained"),
    *("own", "at the peak, MiB"),
)


def row(found: dict[str, Any]) -> list[str]:
    """States held after a step beside the paper's; the peak beside torch's count, and beside the resident set's."""
    held, peak = sum(found["held"][name] for name in STATES), sum(found["peak"].values())
    wide = 2 if found["precision"] == "fp32" else 0
    stage, ranks, parameters = found["stage"], found["ranks"], found["parameters"]
    paper = model_state_bytes(stage, parameters, ranks, parameter_bytes=2 + wide, gradient_bytes=2 + wide).total
    if wide:
        paper -= 4 * parameters / (1 if stage == 0 else ranks)  # fp32 parameters are their own masters
    share = peak / found["resident"]
    return [
        f"{stage}{', tied' if found['tied'] else ''}",
        str(ranks),
        *(f"{size / _MIB:.1f}" for size in (held, paper)),
        f"{held / paper - 1:+.1%}",
        *(f"{size / _MIB:.1f}" for size in (peak, found["allocated"])),
        f"{found['metered'] / found['allocated']:.1%}",
        f"{found['resident'] / _MIB:.1f}",
        f"{share:.1%}" + ("" if round(share, 3) >= EXPLAINED else " missed"),
        f"{found['own'] / _MIB:.1f}",
        ", ".join(f"{name} {value / _MIB:.1f}" for name, value in found["peak"].items() if value >= _MIB / 10),
    ]


def table(everything: Iterable[dict[str, Any]]) -> str:
    """Lines of a table; sizes in MiB."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    lines += ["| " + " | ".join(row(found)) + " |" for found in everything]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tied", type=int, nargs="*", default=[], help="sizes at which a tied head is measured too")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--precision", choices=["bf16", "bf16-lean", "fp32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=8, help="of the one sample that a rank computes")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args()
    everything = []
    for tied, sizes in ((False, options.ranks), (True, options.tied)):
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build(SHAPES["30m"], tied).parameters())
        for ranks in sizes:
            for stage in options.stages:
                case = Case(stage, options.precision, options.tokens, tied)
                lines = run_ranks(ranks, measure, case, limit=200.0)
                found = max((json.loads(own[-1]) for own in lines), key=lambda one: one["resident"])
                facts = {"stage": stage, "ranks": ranks, "precision": options.precision, "tied": tied}
                everything.append({**facts, "parameters": parameters, **found})
                print(" | ".join(row(everything[-1])), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(everything, indent=1) + "\n")
    print("\n" + table(everything))


if __name__ == "__main__":
    main()
