"""Finding units: which module scopes are gathered and released as one.

The repeated blocks of a `ModuleList` or `Sequential` are units; of what is left, large modules (an embedding, a head)
are units of their own, and so are the tiles of `onecopy.tiled`; the root takes the rest. A parameter that several
units use (tied weights, a module in two blocks) goes to the innermost scope that contains them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import torch
from torch import nn

from onecopy.errors import SettingsError
from onecopy.sharding.bucket.bucket import FoundParameter, Place
from onecopy.sharding.model.shared import find_twins
from onecopy.sharding.model.tiled import Tile

SMALL_BYTES = 2**18
"""Parameters of a scope that are to be gathered together and hold less are not worth a message of their own."""

LEFT_TO_ROOT_BYTES: Final = 2**24
"""So many bytes of them the root takes at most, as it is whole for all of the model's forward and backward."""

Units = Literal["auto"] | Iterable[nn.Module | type[nn.Module] | str]

_Chain = tuple[str, ...]
"""Scopes, each inside the one before."""


def find_scopes(model: nn.Module, units: Units) -> list[str]:
    """Names of the modules that are units, the root ("") first, in the order of `model.named_modules()`.

    Args:
        units: "auto"; or modules, module classes (every instance) and names of either, which are taken as they are.

    Raises:
        SettingsError: if something named is not in the model.
    """
    modules = dict(model.named_modules())
    if isinstance(units, str):
        if units != "auto":
            raise SettingsError(f'units must be "auto" or a list of modules, classes or names; found {units!r}')
        chosen = _repeated_blocks(model, "")
        chosen |= _large_leftovers(model, chosen)
    else:
        chosen = set()
        for wanted in units:
            found = {name for name, module in modules.items() if _is_wanted(name, module, wanted)}
            if not found:
                raise SettingsError(
                    f"units= names {wanted!r}, which the model does not contain; names are those of "
                    f"model.named_modules(), for example {list(modules)[1:4]}."
                )
            if without := sorted(name for name in found if not _has_forward(modules[name])):
                raise SettingsError(
                    f"units= names {without[0]!r}, a {type(modules[without[0]]).__name__}, which has no forward of "
                    "its own and cannot be a unit: name the modules inside it."
                )
            chosen |= found
    chosen |= {name for name, module in modules.items() if isinstance(module, Tile)}
    return ["", *(name for name in modules if name in chosen and name)]


def find_parameters(
    model: nn.Module, scopes: Sequence[str], ignored: Iterable[nn.Parameter] = ()
) -> dict[str, list[FoundParameter]]:
    """The parameters of each scope, in the order of `model.named_parameters()`; scopes without any are left out.

    Args:
        ignored: parameters that are left out.

    Raises:
        SettingsError: if two lie over the same memory without being one, or only one of them is ignored.
    """
    everything = dict(model.named_parameters())
    twins = find_twins(everything, dict(model.named_buffers()))
    ignored_ids = {id(parameter) for parameter in ignored}
    for name, own in everything.items():
        if (id(own) in ignored_ids) is not (id(twins.get(id(own), own)) in ignored_ids):
            raise SettingsError(
                f"parameter {name!r} shares its memory with another parameter, and ignored= names only one of them: "
                "name both or neither."
            )
    parameters = {name: p for name, p in everything.items() if id(p) not in ignored_ids}
    chains = _scopes_above(model, scopes)
    places: dict[int, list[Place]] = {}
    shared: dict[int, _Chain] = {}
    objects: dict[int, dict[int, nn.Parameter]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            key = id(twins.get(id(parameter), parameter))
            places.setdefault(key, []).append((module, attribute))
            shared[key] = _common(shared.get(key, chains[module]), chains[module])
            objects.setdefault(key, {})[id(parameter)] = parameter
    found: dict[str, list[FoundParameter]] = {scope: [] for scope in scopes}
    for name, parameter in parameters.items():
        if (key := id(parameter)) in places:
            others = tuple(other for other in objects[key].values() if other is not parameter)
            found[shared[key][-1]].append(FoundParameter(name, parameter, tuple(places[key]), others))
    return {scope: items for scope, items in found.items() if items}


def leave_small_to_root(found: dict[str, list[FoundParameter]]) -> dict[str, list[FoundParameter]]:
    """``found`` with what is not worth a message left to the root, unless it adds up to more than the root may take.

    That is so of the blocks of a narrow net, and of adapters among frozen weights. What is left counts by dtype and
    `requires_grad`, as buckets do.

    Args:
        found: the parameters of each scope, as `find_parameters` has them.
    """
    groups: dict[tuple[str, torch.dtype, bool], list[FoundParameter]] = {}
    for scope, items in found.items():
        for item in items:
            groups.setdefault((scope, item.parameter.dtype, item.parameter.requires_grad), []).append(item)
    small = {
        id(item)
        for (scope, *_), items in groups.items()
        if scope and sum(map(_nbytes, items)) < SMALL_BYTES
        for item in items
    }
    of_root = [item for scope, items in found.items() for item in items if not scope or id(item) in small]
    if not small or sum(map(_nbytes, of_root)) > LEFT_TO_ROOT_BYTES:
        return found
    kept = {scope: [item for item in items if id(item) not in small] for scope, items in found.items() if scope}
    return {"": of_root, **{scope: items for scope, items in kept.items() if items}}


def _nbytes(item: FoundParameter) -> int:
    return item.parameter.numel() * item.parameter.element_size()


def name_units_for(model: nn.Module, scopes: Iterable[str], parameter: str) -> list[str]:
    """Names for `units=` that leave ``parameter`` to the root: ``scopes``, with those around it taken apart."""
    holder = parameter.rpartition(".")[0]
    names: list[str] = []
    for scope in scopes:
        if scope and not _is_below(holder, scope):
            names.append(scope)
        elif scope:
            names += _callable_below(model.get_submodule(scope), scope, holder)
    return names


def _callable_below(module: nn.Module, prefix: str, holder: str) -> list[str]:
    names: list[str] = []
    for attribute, child in module.named_children():
        path = f"{prefix}.{attribute}"
        if not _has_forward(child):
            names += _callable_below(child, path, holder)
        elif _numel(child) and not _is_below(holder, path):
            names.append(path)
    return names


def _scopes_above(model: nn.Module, scopes: Sequence[str]) -> dict[nn.Module, _Chain]:
    """For each module the scopes, outermost first, that every way from the model to it leads through, its own last.

    A module that sits in two blocks, or that another one holds in a list or an attribute to call it, is reached by
    several ways; what they have in common is where its parameters are whole for all who use it.
    """
    names = {model.get_submodule(scope): scope for scope in scopes}
    chains: dict[nn.Module, _Chain] = {}
    to_visit: list[tuple[nn.Module, _Chain]] = [(model, ())]
    known = set(model.modules())
    while to_visit:
        module, above = to_visit.pop()
        chain = (*above, names[module]) if module in names else above
        if module in chains:
            chain = _common(chains[module], chain)
            if chain == chains[module]:
                continue
        chains[module] = chain
        to_visit += [(child, chain) for child in _used_by(module) if child in known]
    return chains


def _used_by(module: nn.Module) -> Iterator[nn.Module]:
    """Its children, and modules that it holds without having registered them, directly or in a list, tuple or dict."""
    yield from module.children()
    for value in vars(module).values():
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, nn.Module))
        elif type(value) is dict:
            yield from (item for item in value.values() if isinstance(item, nn.Module))


def _common(one: _Chain, other: _Chain) -> _Chain:
    return tuple(scope for scope in one if scope in other)


def _is_below(name: str, scope: str) -> bool:
    return scope == "" or name == scope or name.startswith(scope + ".")


def _has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; lists and dicts of modules or parameters cannot."""
    return type(module).forward is not nn.Module.forward


def _is_wanted(name: str, module: nn.Module, wanted: object) -> bool:
    if isinstance(wanted, str):
        return wanted in (name, type(module).__name__)
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return module is wanted


def _repeated_blocks(module: nn.Module, prefix: str) -> set[str]:
    """Names of repeated blocks below ``module``; inside one only if most of its parameters are in blocks again.

    A block's own layers are none: a convolution with its norm is not worth a message, and three layers make a block.
    """
    blocks = _blocks_of(module)
    found: set[str] = set()
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        inside = {inner: child.get_submodule(inner[len(path) + 1 :]) for inner in _repeated_blocks(child, path)}
        if name in blocks:
            found.add(path)
            inside = {inner: block for inner, block in inside.items() if _count_layers(block) >= 3}
            if 2 * sum(map(_numel, inside.values())) < _numel(child):
                continue
        found |= inside.keys()
    return found


def _count_layers(module: nn.Module) -> int:
    """Modules at or below ``module`` that have parameters of their own."""
    return sum(any(p is not None for p in part._parameters.values()) for part in module.modules())


def _blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a list that share their class with another child and have parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return {}
    children = {name: child for name, child in module.named_children() if _numel(child) and _has_forward(child)}
    classes = [_class_of(child) for child in children.values()]
    return {name: child for name, child in children.items() if classes.count(_class_of(child)) > 1}


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class; that of the original where `torch.compile` has wrapped it."""
    original = getattr(module, "_orig_mod", module) if isinstance(module, torch._dynamo.OptimizedModule) else module
    return type(original)


def _large_leftovers(model: nn.Module, blocks: set[str]) -> set[str]:
    """Modules with parameters of their own, outside of blocks, at least half as large as the typical block."""
    if not blocks:
        return set()
    typical = statistics.median(_numel(model.get_submodule(name)) for name in blocks)
    times_held: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                times_held[id(parameter)] = times_held.get(id(parameter), 0) + 1
    return {
        name
        for name, module in model.named_modules()
        if name
        and _has_forward(module)
        and not any(_is_below(name, block) for block in blocks)
        and sum(p.numel() for p in module._parameters.values() if p is not None and times_held[id(p)] == 1)
        >= typical / 2
    }


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
