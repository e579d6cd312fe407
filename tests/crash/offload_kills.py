"""Kills at random moments: ranks that train with states on disk, and save, are killed and started again.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/crash/offload_kills.py --kills 100

Oracle: the weights after each step of a run without offload that is never killed. What a killed run has left in the
directory of states is gone once the next one has begun; what is loaded is the last step that rank 0 had been told was
saved, or the one after it, to the last bit, and training goes on from it.
"""

from __future__ import annotations

import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

# What every rank would otherwise import for itself, which takes seconds.
import torch._dynamo
from torch import nn
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import kills
import onecopy
import onecopy.checkpoint.load
import onecopy.checkpoint.save
from models import Stack, seeded, vector_batches
from onecopy.errors import CheckpointError, CollectiveError
from oracle import gathered_weights, part
from ranks import run_ranks

LONGEST = 0.6
"""Seconds until a rank is killed at the latest; making the model, a step and a save take about 0.1 each."""

STEPS = 200
"""After so many a run begins anew."""


@dataclass
class Tally(kills.Tally):
    """What happened.

    Attributes:
        resumed: trials that left a checkpoint to go on from.
    """

    resumed: int = 0


def _start(states: Path | None) -> tuple[nn.Module, Optimizer]:
    offload = onecopy.Offload(states, states) if states is not None else None
    model = onecopy.shard(seeded(Stack), 3, offload=offload)
    return model, AdamW(model.parameters(), lr=1e-2, fused=True)


def _step(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    model(*part(vector_batches(8)[number % 8], rank, 2)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> list[float]:
    return [value for tensor in gathered_weights(model).values() for value in tensor.flatten().tolist()]


def _without_offload(rank: int) -> list[list[float]]:
    model, optimizer = _start(None)
    found = [_weights(model)]
    for number in range(STEPS + 50):
        _step(model, optimizer, number, rank)
        found.append(_weights(model))
    return found


def _train_until_killed(rank: int, place: Path, after: float | None, expected: list[list[float]]) -> None:
    kills.end_after(after)
    told = kills.Told(place)
    with suppress(CollectiveError):
        model, optimizer = _start(place / "states")
        number = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                number = int(onecopy.load(place / "c", model, optimizer).extra)
            except CheckpointError as error:
                if "there is no checkpoint" not in str(error) and "cannot look for checkpoints" not in str(error):
                    raise
        assert _weights(model) == expected[number], f"step {number} was not saved whole"
        if number >= STEPS:
            signal.pause()
        while True:
            _step(model, optimizer, number, rank)
            number += 1
            onecopy.save(place / "c", model, optimizer, step=number, extra=number, keep=1)
            if rank == 0:
                told.note(number)


def kill_at_random(place: Path, number: int, seed: int = 0) -> Tally:
    """Kill so many ranks that train with states on disk.

    Args:
        place: an empty directory.

    Raises:
        AssertionError: if a checkpoint was lost or harmed, or something was left.
    """
    expected = run_ranks(2, _without_offload, timeout=120)[0]
    tally = Tally()

    def run(rank: int, after: float | None) -> None:
        _train_until_killed(rank, place, after, expected)

    def look() -> int:
        found = run_ranks(1, _look, place, group=False)[0]
        tally.resumed += found > 0
        return found

    kills.kill_ranks(tally, place, number, LONGEST, seed, run, look, anew_at=STEPS)
    return tally


def _look(_: int, place: Path) -> int:
    """The step that is loaded, 0 if there is none. What was left in the directory of states is gone."""
    model, optimizer = _start(place / "states")
    assert list((place / "states").iterdir()) == []
    try:
        return int(onecopy.load(place / "c", model, optimizer).extra)
    except CheckpointError:
        return 0


def _tell(tally: Tally) -> str:
    return (
        f"{tally.kills} ranks killed in {tally.trials} trials: no checkpoint harmed, no file left\n"
        f"{tally.resumed} trials left a checkpoint to go on from"
    )


if __name__ == "__main__":
    kills.main(__doc__ or "", "onecopy-offload-kills-", 100, kill_at_random, _tell)
