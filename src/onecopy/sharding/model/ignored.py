"""Parameters that `shard(ignored=)` leaves as they are: plain, whole on each rank, and the user's business alone.

A mark on the parameter itself tells it from one that came into the model after sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from torch import Tensor, nn

from onecopy.errors import SettingsError

Ignored = Iterable[nn.Parameter | nn.Module | str]

_MARK: Final = "_onecopy_ignored"


def find_ignored(model: nn.Module, ignored: Ignored) -> dict[str, nn.Parameter]:
    """The parameters that ``ignored`` names, by name: parameters, modules for all that is in them, or names of either.

    Raises:
        SettingsError: if something named is not in the model.
    """
    if isinstance(ignored, str | nn.Module | Tensor):
        raise SettingsError(f"ignored must be a list of parameters, modules or names; found {type(ignored).__name__}")
    everything = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    found: set[int] = set()
    for wanted in ignored:
        if isinstance(wanted, str) and wanted in everything:
            ids = {id(everything[wanted])}
        elif isinstance(wanted, Tensor):
            ids = {id(wanted)} & {id(parameter) for parameter in everything.values()}
        else:
            module = modules.get(wanted) if isinstance(wanted, str) else wanted
            inside = isinstance(module, nn.Module) and any(module is own for own in modules.values())
            ids = {id(parameter) for parameter in module.parameters()} if inside and module is not None else set()
        if not ids:
            raise SettingsError(_not_there(wanted, [*everything, *modules]))
        found |= ids
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in found}


def mark_ignored(parameter: Tensor) -> None:
    setattr(parameter, _MARK, True)


def is_ignored(parameter: Tensor) -> bool:
    return getattr(parameter, _MARK, False) is True


def _not_there(wanted: object, names: Iterable[str]) -> str:
    if not isinstance(wanted, str):
        what = type(wanted).__name__
        return f"ignored= names a {what} that is no parameter of the model, and no module of it that has any"
    near = get_close_matches(wanted, names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"ignored= names {wanted!r}, which is no parameter of the model, and no module of it that has any{meant}"
