"""Words: numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def count(value: float) -> str:
    """A whole number, in groups of three digits."""
    return f"{value:,.0f}"


def megabytes(size: float) -> str:
    """Bytes, in the unit that leaves one to four digits. MB = 1e6 bytes."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def milliseconds(seconds: float) -> str:
    """Seconds, as milliseconds."""
    return f"{seconds * 1e3:,.1f} ms"


def difference(measured: float, expected: float) -> str:
    """How far ``measured`` is from ``expected``, in percent of it."""
    if measured == expected:
        return "exact"
    if not expected:
        return "not expected"
    return f"{(measured - expected) / expected:+.2%}"


def ranks(numbers: Sequence[object]) -> str:
    """Ranks by their numbers."""
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


def event(kind: str, who: str, seconds: float, *, given_up: bool = False) -> str:
    """What happened to ranks.

    Args:
        kind: "recovery", ranks were lost and came back; "slow", a rank did not answer.
        who: the ranks in words.
        seconds: that the loss cost, or for which there was no answer.
    """
    if kind == "recovery":
        return f"{who} lost and replaced, {seconds:,.2f} s lost"
    return f"{who} slow for {seconds:,.2f} s{', given up' if given_up else ''}"


def setting(value: Any) -> str:
    """A value of the config."""
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", []):
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
