"""Kills at random moments: ranks that train with states on disk, and save, are killed and started again.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/crash/offload_kills.py --kills 100

Oracle: the weights after each step of a run without offload that is never killed. What a killed run has left in the
directory of states is gone once the next one has begun; what is loaded is the last step that rank 0 had been told was
saved, or the one after it, to the last bit, and training goes on from it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# What every rank would otherwise import for itself, which takes seconds.
import torch._dynamo
from torch import nn
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import onecopy
import onecopy.checkpoint.load
import onecopy.checkpoint.save
from models import Stack, seeded, vector_batches
from onecopy.errors import CheckpointError, CollectiveError
from oracle import gathered_weights, part
from ranks import RankError, run_ranks

LONGEST = 0.6
"""Seconds until a rank is killed at the latest; making the model, a step and a save take about 0.1 each."""

STEPS = 200
"""After so many a run begins anew."""

VICTIMS = ((0,), (1,), (0, 1))


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: processes that were killed.
        resumed: trials that went on from a checkpoint.
    """

    kills: int = 0
    trials: int = 0
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
    states = place / "states"
    if after is not None:
        # The kernel ends the process, wherever it is: nothing runs for a signal without a handler.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after)
    told = os.open(place / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(CollectiveError):
        model, optimizer = _start(states)
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
                os.write(told, f"{number}\n".encode())


def kill_at_random(place: Path, kills: int, seed: int = 0) -> Tally:
    """Kill so many ranks.

    Args:
        place: an empty directory.

    Raises:
        AssertionError: if a checkpoint was lost or harmed, or something was left.
    """
    chance = random.Random(seed)
    expected = run_ranks(2, _without_offload, timeout=120)[0]
    tally, known = Tally(), 0
    while tally.kills < kills:
        victims = VICTIMS[tally.trials % len(VICTIMS)]
        moments: dict[int, float] = {rank: chance.uniform(0.0, LONGEST) for rank in victims}

        def train(rank: int, moments: Any = moments) -> None:
            _train_until_killed(rank, place, moments.get(rank), expected)

        with pytest.raises(RankError, match="SIGALRM"):
            run_ranks(2, train)
        tally.trials += 1
        tally.kills += len(victims)
        last, found = run_ranks(1, _look, place, group=False)[0]
        # The one after it may have been committed when the kill came before rank 0 could note it.
        assert last <= found <= max(last, known) + 1, (last, found, known)
        known = found
        tally.resumed += found > 0
        if found >= STEPS:
            shutil.rmtree(place / "c")
            (place / "told").unlink()
            known = 0
    return tally


def _look(_: int, place: Path) -> tuple[int, int]:
    """The last step that rank 0 was told of, and the one that is loaded. What was left in the directory is gone."""
    model, optimizer = _start(place / "states")
    assert list((place / "states").iterdir()) == []
    told = (place / "told").read_text().splitlines() if (place / "told").exists() else []
    try:
        found = int(onecopy.load(place / "c", model, optimizer).extra)
    except CheckpointError:
        found = 0
    return int(told[-1]) if told else 0, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="onecopy-offload-kills-"))
    start = time.monotonic()
    try:
        tally = kill_at_random(place, chosen.kills, chosen.seed)
    finally:
        shutil.rmtree(place)
    seconds = time.monotonic() - start
    print(f"{tally.kills} ranks killed in {tally.trials} trials, {seconds:.0f} s: no checkpoint harmed, no file left")
    print(f"{tally.resumed} trials left a checkpoint to go on from")


if __name__ == "__main__":
    main()
