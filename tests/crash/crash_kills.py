"""Kills at random moments: ranks that save without end are killed, and what they left is loaded. By the hundred.

    python tests/crash/crash_kills.py --kills 500

Every rank is forked from one warm parent, so a trial takes a fraction of a second. Each saved model holds one constant
in every weight, so a mixture would show. Oracle: what rank 0 had been told was saved, noted outside of the checkpoints
before it was killed; what is loaded must be that or the one after it, whole, and nothing may be reported as damaged.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

# What every rank would otherwise import for itself, which takes seconds.
import torch._dynamo
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import kills
import onecopy
import onecopy.checkpoint.load
import onecopy.checkpoint.save
from models import filled
from onecopy.checkpoint.group import Group
from onecopy.errors import CheckpointError, CollectiveError
from oracle import gathered_weights
from ranks import run_ranks

LONGEST = 0.5
"""Seconds until a rank is killed at the latest; a save takes about 0.1."""


@dataclass
class Tally(kills.Tally):
    """What happened.

    Attributes:
        moments: what lay in the directory after a trial that a crash had left, by its kind.
        newer: trials after which a checkpoint was loaded that rank 0 had not yet been told of.
    """

    newer: int = 0
    moments: Counter[str] = field(default_factory=Counter)


def _model(value: float) -> nn.Module:
    return onecopy.shard(filled(value), 3)


def _save_until_killed(place: Path, first: int, rank: int, after: float | None, background: bool) -> None:
    model = _model(float(first))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    told = kills.Told(place)
    Group.current()
    kills.end_after(after)
    with suppress(CollectiveError):
        for value in range(first, first + 10_000):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(value))
            saving = onecopy.save(place / "c", model, optimizer, step=value, extra=value, keep=1, background=background)
            saving.wait()
            if rank == 0:
                told.note(value)


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


def kill_at_random(place: Path, number: int, seed: int = 0) -> Tally:
    """Kill so many ranks that save without end.

    Args:
        place: an empty directory.

    Raises:
        AssertionError: if a checkpoint was lost, mixed or damaged.
    """
    tally = Tally()

    def run(rank: int, after: float | None) -> None:
        _save_until_killed(place, tally.known + 1, rank, after, background=bool(tally.trials % 2))

    def look() -> int:
        left = {path.name.partition("step-")[0] for path in (place / "c").glob(".*ing-*")} if tally.known else set()
        tally.moments.update(left or {"nothing"})
        found = run_ranks(1, _load, place / "c", group=False)[0] or 0
        tally.newer += found > kills.Told.last(place)
        return found

    kills.kill_ranks(tally, place, number, LONGEST, seed, run, look)
    return tally


def _tell(tally: Tally) -> str:
    return (
        f"{tally.kills} ranks killed in {tally.trials} trials: no checkpoint was lost\n"
        f"what the kills had left: {dict(tally.moments)}; committed but not yet told: {tally.newer}"
    )


if __name__ == "__main__":
    kills.main(__doc__ or "", "onecopy-kills-", 500, kill_at_random, _tell)
