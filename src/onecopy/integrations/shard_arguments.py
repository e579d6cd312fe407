"""What users say in `shard=` of a Trainer or an Accelerator, checked before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.sharding.setup.api import shard

NAMES: Final = tuple(name for name in inspect.signature(shard).parameters if name != "model")
"""Arguments of `onecopy.shard`."""


def shard_arguments(given: object, refused: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The keyword arguments for `onecopy.shard` in ``given``.

    Args:
        refused: arguments that the tool decides itself, and where a user says them instead.

    Raises:
        SettingsError: if ``given`` is no mapping, or names what `onecopy.shard` does not take.
    """
    if not isinstance(given, Mapping):
        raise SettingsError(f'shard= must hold arguments of onecopy.shard, such as {{"stage": 3}}; found {given!r}')
    for name in given:
        if refused and name in refused:
            raise SettingsError(f"shard= must not set {name!r}: {refused[name]}")
        if name not in NAMES:
            near = get_close_matches(str(name), NAMES, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(NAMES)}"
            raise SettingsError(f"shard= holds {name!r}, which onecopy.shard does not take; {known}")
    return dict(given)
