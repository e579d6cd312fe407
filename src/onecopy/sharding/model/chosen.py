"""Parameters that `shard(whole=)` chooses: by name, by the class of the module that holds them, or by a predicate; and
those that Muon is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from torch import Tensor, nn

from onecopy.errors import SettingsError

Whole = Callable[[str, nn.Parameter], bool] | Iterable[nn.Parameter | nn.Module | type[nn.Module] | str]


def find_chosen(model: nn.Module, whole: Whole | None) -> set[int]:
    """The ids of the parameters that ``whole`` chooses.

    Args:
        whole: called with each parameter's name and the parameter; or a list of parameters, modules and module classes
            for all that is in them, or names of either. None chooses none.

    Raises:
        SettingsError: if something named is not in the model, or ``whole`` is neither.
    """
    if whole is None:
        return set()
    if isinstance(whole, str | nn.Module | Tensor | type) or not (callable(whole) or isinstance(whole, Iterable)):
        raise SettingsError(
            f"whole must be a predicate (lambda name, p: p.ndim == 2), or a list of names, modules, classes and "
            f"parameters; found {whole!r}"
        )
    names = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(whole, Iterable):
        return {id(parameter) for name, parameter in names.items() if whole(name, parameter)}
    modules = dict(model.named_modules())
    found: set[int] = set()
    for wanted in whole:
        if isinstance(wanted, Tensor):
            ids = {id(wanted)} & {id(parameter) for parameter in names.values()}
        elif isinstance(wanted, str) and wanted in names:
            ids = {id(names[wanted])}
        else:
            holders = [module for name, module in modules.items() if _is_wanted(name, module, wanted)]
            ids = {id(parameter) for module in holders for parameter in module.parameters()}
        if not ids:
            near = get_close_matches(wanted, [*names, *modules], n=1) if isinstance(wanted, str) else []
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(
                f"whole= names {wanted!r}, which is no parameter of the model, and no module that has any{meant}"
            )
        found |= ids
    return found


def hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the parameters that Muon is for: matrices, but neither embeddings nor the head of a language model."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    return [name for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad and id(p) not in excluded]


def _is_wanted(name: str, module: nn.Module, wanted: object) -> bool:
    return name == wanted or module is wanted or (isinstance(wanted, type) and isinstance(module, wanted))
