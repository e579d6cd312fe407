"""Words: numbers as a person reads them."""

from __future__ import annotations

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


def setting(value: Any) -> str:
    """A value of the config."""
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", []):
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
