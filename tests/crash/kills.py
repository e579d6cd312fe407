"""Kills: ranks that end at random moments, trial after trial in one place, as a job that is started again and again.

What a rank does and what must be found after its end is each script's own: `crash_kills.py`, `offload_kills.py`.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ranks import RankError, run_ranks

VICTIMS: Final = ((0,), (1,), (0, 1))

T = TypeVar("T", bound="Tally")


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: processes that were killed.
        known: what the last trial left, as a number that rises from save to save.
    """

    kills: int = 0
    trials: int = 0
    known: int = 0


def end_after(seconds: float | None) -> None:
    """Let the kernel end this process after so long, wherever it is; None: never."""
    if seconds is not None:
        # Nothing runs for a signal without a handler.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class Told:
    """Where a rank notes what it has been told was saved, which outlives it."""

    def __init__(self, place: Path) -> None:
        self._file = os.open(place / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, number: int) -> None:
        os.write(self._file, f"{number}\n".encode())

    @staticmethod
    def last(place: Path) -> int:
        """The last number that was noted, 0 if there is none."""
        told = (place / "told").read_text().splitlines() if (place / "told").exists() else []
        return int(told[-1]) if told else 0


def kill_ranks(
    tally: Tally,
    place: Path,
    kills: int,
    longest: float,
    seed: int,
    run: Callable[[int, float | None], None],
    look: Callable[[], int],
    anew_at: int | None = None,
) -> None:
    """Run two ranks again and again, and kill one or both at a random moment, until so many are dead.

    Args:
        longest: seconds until a rank is killed at the latest.
        run: what a rank does, given its number and the seconds after which it ends (`end_after`). Rank 0 notes in
            `Told` what it is told was saved.
        look: what is found after a trial: the number of the newest save.
        anew_at: the number from which on the checkpoints, in ``place / "c"``, are removed and all begins anew.

    Raises:
        AssertionError: if what is found is neither what rank 0 was told of last nor the one after it.
    """
    chance = random.Random(seed)
    while tally.kills < kills:
        victims = VICTIMS[tally.trials % len(VICTIMS)]
        moments = {rank: chance.uniform(0.0, longest) for rank in victims}

        def trial(rank: int, moments: dict[int, float] = moments) -> None:
            run(rank, moments.get(rank))

        with pytest.raises(RankError, match="SIGALRM"):
            run_ranks(2, trial)
        tally.trials += 1
        tally.kills += len(victims)
        last, found = Told.last(place), look()
        # The one after it may have been committed when the kill came before rank 0 could note it.
        assert last <= found <= max(last, tally.known) + 1, (last, found, tally.known)
        tally.known = found
        if anew_at is not None and found >= anew_at:
            shutil.rmtree(place / "c")
            (place / "told").unlink()
            tally.known = 0


def main(summary: str, prefix: str, number: int, kill: Callable[[Path, int, int], T], tell: Callable[[T], str]) -> None:
    """The command line of a script: kills in a directory of their own, and what there is to say of them.

    Args:
        number: of kills where the command line says none.
        kill: kills so many ranks in a place, given a seed.
        tell: what to print of what happened.
    """
    parser = argparse.ArgumentParser(description=summary.splitlines()[0])
    parser.add_argument("--kills", type=int, default=number)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix=prefix))
    start = time.monotonic()
    try:
        tally = kill(place, chosen.kills, chosen.seed)
    finally:
        shutil.rmtree(place)
    print(f"{tell(tally)}\n{time.monotonic() - start:.0f} s")
