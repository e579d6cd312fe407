"""Quantities: sizes, rates and counts as people write them ("24GB", "400gbit", "7.5e9", "7.5B"), and back to words."""

from __future__ import annotations

import re
from typing import Final

from onecopy.errors import SettingsError

_PREFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_NUMBER: Final = r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*"


def parse_bytes(text: str) -> float:
    """Bytes of "24GB" (1e9), "24GiB" (2^30) or "512B".

    Raises:
        SettingsError: if it is none of these; a number without a unit is not.
    """
    found = re.fullmatch(_NUMBER + r"([kmgt]i?)?(b)?", text.lower())
    if not found or (found[2] or "") not in _PREFIXES:
        raise SettingsError(f"a size must be written like 24GB, 24GiB or 512MB; found {text!r}")
    value = _positive(found[1], text)
    if not (found[2] or found[3]):
        raise SettingsError(f"a size needs a unit; found {text!r}, write {text}GB (1e9 bytes each) or {text}GiB")
    return value * _PREFIXES[found[2] or ""]


def parse_rate(text: str) -> float:
    """Bytes a second of "400gbit" (bits) or "50GB/s" (bytes).

    Raises:
        SettingsError: if it is none of these; a number without a unit is not.
    """
    found = re.fullmatch(_NUMBER + r"([kmgt]i?)?(bit|b)?(?:/s|ps)?", text.lower())
    if not found or (found[2] or "") not in _PREFIXES:
        raise SettingsError(f"a rate must be written like 400gbit or 50GB/s; found {text!r}")
    value = _positive(found[1], text)
    if not (found[2] or found[3]):
        raise SettingsError(f"a rate needs a unit; found {text!r}, write {text}gbit or {text}GB/s")
    return value * _PREFIXES[found[2] or ""] / (8 if found[3] == "bit" else 1)


def parse_count(text: str) -> float:
    """A number of parameters: "7.5e9", "7.5B", "350M", "1T".

    Raises:
        SettingsError: if it is none of these.
    """
    found = re.fullmatch(_NUMBER + r"([kmbt])?", text.lower())
    if not found:
        raise SettingsError(f"a number of parameters must be written like 7.5e9, 7.5B or 350M; found {text!r}")
    return _number(found[1], text) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2] or ""]


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"found {whole!r}, whose number cannot be read") from None


def _positive(text: str, whole: str) -> float:
    if not (value := _number(text, whole)):
        raise SettingsError(f"a size or rate must be above 0; found {whole!r}")
    return value


def gigabytes(nbytes: float) -> str:
    """Bytes in GB (1e9), or MB (1e6) where that reads better."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def rate(nbytes: float) -> str:
    """Bytes a second, as a network's people say it."""
    bits = nbytes * 8
    return f"{bits / 1e9:,.4g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.4g} Mbit/s"


def count(value: float) -> str:
    """A number of parameters: 7.5 B, 124 M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"
