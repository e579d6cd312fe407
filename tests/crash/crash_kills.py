"""Kills at random moments: ranks that save without end are killed, and what they left is loaded. By the hundred.

    python tests/crash/crash_kills.py --kills 500

Every rank is forked from one warm parent, so a trial takes a fraction of a second. Each saved model holds one constant
in every weight, so a mixture would show. Oracle: what rank 0 had been told was saved, noted outside of the checkpoints
before it was killed; what is loaded must be that or the one after it, whole, and nothing may be reported as damaged.
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
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

# What every rank would otherwise import for itself, which takes seconds.
import torch._dynamo
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import onecopy
import onecopy.checkpoint.load
import onecopy.checkpoint.save
from models import filled
from onecopy.checkpoint.group import Group
from onecopy.errors import CheckpointError, CollectiveError
from oracle import gathered_weights
from ranks import RankError, run_ranks

LONGEST = 0.5
"""Seconds until a rank is killed at the latest; a save takes about 0.1."""

VICTIMS = ((0,), (1,), (0, 1))


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: processes that were killed.
        moments: what lay in the directory after a trial that a crash had left, by its kind.
        newer: trials after which a checkpoint was loaded that rank 0 had not yet been told of.
    """

    kills: int = 0
    trials: int = 0
    newer: int = 0
    moments: Counter[str] = field(default_factory=Counter)


def _model(value: float) -> nn.Module:
    return onecopy.shard(filled(value), 3)


def _save_until_killed(rank: int, place: Path, first: int, after: float | None, background: bool) -> None:
    directory = place / "c"
    model = _model(float(first))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    told = os.open(place / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Group.current()
    if after is not None:
        # The kernel ends the process, wherever it is: nothing runs for a signal without a handler.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after)
    with suppress(CollectiveError):
        for value in range(first, first + 10_000):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(value))
            saving = onecopy.save(directory, model, optimizer, step=value, extra=value, keep=1, background=background)
            saving.wait()
            if rank == 0:
                os.write(told, f"{value}\n".encode())


def _load(rank: int, directory: Path) -> int | None:
    model = _model(-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            loaded = onecopy.load(directory, model)
        except CheckpointError as error:
            if "there is no checkpoint" in str(error) or "cannot look for checkpoints" in str(error):
                # Killed before the first one: there is nothing, and nothing is damaged.
                return None
            raise
    for weight in gathered_weights(model).values():
        assert torch.equal(weight, torch.full_like(weight, float(loaded.extra)))
    return int(loaded.extra)


def kill_at_random(place: Path, kills: int, seed: int = 0) -> Tally:
    """Kill so many ranks.

    Args:
        place: an empty directory; the trials go on in one, as a job that is started again and again.

    Raises:
        AssertionError: if a checkpoint was lost, mixed or damaged.
    """
    chance = random.Random(seed)
    tally, known = Tally(), 0
    while tally.kills < kills:
        victims = VICTIMS[tally.trials % len(VICTIMS)]
        moments: dict[int, float] = {rank: chance.uniform(0.0, LONGEST) for rank in victims}
        background = bool(tally.trials % 2)

        def save(rank: int, moments: Any = moments, first: int = known + 1, background: bool = background) -> None:
            _save_until_killed(rank, place, first, moments.get(rank), background)

        with pytest.raises(RankError, match="SIGALRM"):
            run_ranks(2, save)
        tally.trials += 1
        tally.kills += len(victims)
        left = {path.name.partition("step-")[0] for path in (place / "c").glob(".*ing-*")} if known else set()
        tally.moments.update(left or {"nothing"})
        told = [int(line) for line in (place / "told").read_text().splitlines()]
        last = told[-1] if told else 0
        found = run_ranks(1, _load, place / "c", group=False)[0] or 0
        # The one after it may have been committed when the kill came before rank 0 could note it.
        assert last <= found <= max(last, known) + 1, (last, found, known)
        tally.newer += found > last
        known = found
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="onecopy-kills-"))
    start = time.monotonic()
    try:
        tally = kill_at_random(place, chosen.kills, chosen.seed)
    finally:
        shutil.rmtree(place)
    seconds = time.monotonic() - start
    print(f"{tally.kills} ranks killed in {tally.trials} trials, {seconds:.0f} s: no checkpoint was lost")
    print(f"what the kills had left: {dict(tally.moments)}; committed but not yet told: {tally.newer}")


if __name__ == "__main__":
    main()
