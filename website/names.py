"""Names: what docstrings and signatures say of the public names, as Markdown.

The source is read by griffe and not imported, so that integrations are shown whether or not their packages are there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import griffe

import onecopy
from pages import ROOT

GROUPS: Final = {
    "Shard a model": (
        "shard",
        "Stage",
        "Precision",
        "Offload",
        "Activations",
        "activations.checkpoint",
        "tiled",
        "needs_whole",
    ),
    "A loss in chunks": ("chunk_loss", "chunked_cross_entropy"),
    "Whole parameters": ("gathered", "materialize", "SlicedTensor", "padded_numel"),
    "A moving average": ("ema", "Ema"),
    "Save and load": (
        "save",
        "Saving",
        "load",
        "Loaded",
        "save_pretrained",
        "load_pretrained",
        "export",
        "Exported",
    ),
    "Survive the loss of ranks": ("join", "resilient", "Run"),
    "Find settings by measuring": ("tune",),
    "What is held and what is sent": ("meter", "ledger", "Ledger", "Traffic", "Entry", "profile", "Profile", "arena"),
    "Settings of other libraries": ("from_deepspeed", "from_accelerate"),
}
"""Public names by what they are for. A public name that is in no group comes last."""

RETURNED: Final = {
    "meter": "onecopy.observe.meter.Meter",
    "profile": "onecopy.observe.timeline.Event",
    "arena": "onecopy.memory.arena.Arena",
    "from_accelerate": "onecopy.integrations.translation.Translation",
}
"""Classes without a public name that public functions return, by the function that they are shown below."""

METHODS: Final = {
    "Stage": ("of",),
    "Precision": ("of",),
    "Offload": (),
    "Activations": (),
    "SlicedTensor": (),
    "Ledger": (),
    "Arena": (),
    "Meter": ("table", "reset_peaks"),
    "ShardedStrategy": (),
    "ShardedTrainer": (),
    "Accelerator": (),
}
"""Methods for users, of classes that have others for the engine, or for the library that calls them."""

INTEGRATIONS: Final = {
    "Hugging Face": ("onecopy.integrations.transformers", ("sharded", "ShardedTrainer")),
    "Accelerate": ("onecopy.integrations.accelerate", ("Accelerator",)),
    "Lightning": ("onecopy.integrations.lightning.strategy", None),
    "FSDP2": ("onecopy.compat.fsdp2", None),
    "DeepSpeed": ("onecopy.compat.deepspeed", None),
    "DeepSpeed's zero": ("onecopy.compat.deepspeed.zero", None),
}
"""Modules, and their names that are shown; None: all public ones that onecopy defines."""

Object = griffe.Object | griffe.Alias


@cache
def package() -> Object:
    """The source of onecopy."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"], docstring_parser=griffe.Parser.google)
    loaded = loader.load("onecopy")
    loader.resolve_aliases(implicit=True, external=False)
    return loaded


def find(path: str) -> Object:
    """What is at a dotted path below onecopy. A function hides a module of its name."""
    found = package()[path]
    name = path.rpartition(".")[2]
    return found.members[name] if found.is_module and name in found.members else found


def public_names() -> list[str]:
    """Names of `import onecopy`, with those of its public modules in their place."""
    own = [name for name in onecopy.__all__ if not inspect.ismodule(getattr(onecopy, name))]
    modules = [name for name in onecopy.__all__ if name not in own]
    # `Activations` has its place at the top level already.
    return own + [f"{m}.{n}" for m in modules for n in getattr(onecopy, m).__all__ if n not in own]


def names() -> str:
    """The page of `import onecopy`."""
    known = public_names()
    placed = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": tuple(name for name in known if name not in placed)}
    parts = ["# onecopy", f"`import onecopy` depends on PyTorch alone. It has {len(known)} public names."]
    for title, names in groups.items():
        here = [name for name in names if name in known]
        if here:
            parts.append(f"## {title}")
        for name in here:
            parts.append(_entry(f"onecopy.{name}", find(name)))
            if name in RETURNED:
                path = RETURNED[name]
                parts.append(_entry(path.rpartition(".")[2], find(path.removeprefix("onecopy."))))
    return "\n\n".join(parts) + "\n"


def integrations() -> str:
    parts = [
        "# Integrations",
        "Each part works with a package that it does not install by itself: "
        "`pip install 'onecopy[integrations]'`. [In the tools people train with](../integrations.md) shows how to use "
        "them, and what each was tried with.",
    ]
    for title, (path, names) in INTEGRATIONS.items():
        module = package()[path.removeprefix("onecopy.")]
        parts += [f"## {title}", _text(module.docstring)]
        for name in names or [str(name) for name in module.exports or module.members]:
            member = module.members[name]
            # Without a list of its names, a module shows what it defines itself.
            listed = names or module.exports
            if name.startswith("_") or (member.is_alias and not (listed and member.target_path.startswith("onecopy."))):
                continue
            found = find(f"{module.path.removeprefix('onecopy.')}.{name}")
            if found.is_class or found.is_function:
                parts.append(_entry(f"{path.removesuffix('.strategy')}.{name}", found))
    return "\n\n".join(parts) + "\n"


def errors() -> str:
    parts = ["# Errors", _text(package()["errors"].docstring)]
    for name, found in package()["errors"].members.items():
        if found.is_class:
            bases = ", ".join(f"`{base}`" for base in found.bases)
            parts += [f"## {name}", f"Bases: {bases}", _text(found.docstring)]
    return "\n\n".join(parts) + "\n"


def _entry(title: str, found: Object) -> str:
    """A name: its signature, its docstring, and if it is a class its own methods."""
    target = found.final_target if found.is_alias else found
    if target.is_class:
        parts = [f"### class `{title}`", *_docstring(target)]
        shown = METHODS.get(title.rpartition(".")[2], tuple(target.members))
        for name, member in target.members.items():
            if member.is_function and name in shown and not name.startswith("_") and member.docstring:
                parts += [f"#### `{title.rpartition('.')[2]}.{name}`", _signature(name, member), *_docstring(member)]
        properties = [
            f"- `{name}`: {line_of(member.docstring.value)}"
            for name, member in target.members.items()
            if name not in METHODS
            and member.is_attribute
            and "property" in member.labels
            and not name.startswith("_")
            and member.docstring
        ]
        return "\n\n".join(parts + (["Properties:", "\n".join(properties)] if properties else []))
    if target.is_function:
        return "\n\n".join([f"### `{title}`", _signature(title, target), *_docstring(target)])
    return "\n\n".join([f"### `{title}`", *_docstring(target)])


def _signature(name: str, function: Any) -> str:
    shown, marked = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        if parameter.kind.value == "keyword-only" and not marked:
            shown.append("*")
        marked = marked or parameter.kind.value in ("keyword-only", "variadic positional")
        kind = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = "" if parameter.default is None or stars else f" = {parameter.default}"
        shown.append(f"{stars}{parameter.name}{kind}{default}")
    returns = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){returns}"
    return f"```text\n{line}\n```"


def _docstring(found: Any) -> Iterator[str]:
    """The sections of a docstring as Markdown."""
    if found.docstring is None:
        return
    for section in found.docstring.parse(griffe.Parser.google, warnings=False):
        match section.kind.value:
            case "text":
                yield prose(section.value)
            case "parameters" | "attributes" | "raises" | "other parameters":
                title = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Errors"}
                yield f"**{title.get(section.kind.value, 'Arguments')}**"
                yield "\n".join(_items(section.value, found, section.kind.value))
            case "returns" | "yields":
                yield f"**{section.kind.value.title()}** " + " ".join(
                    line_of(item.description) for item in section.value
                )
            case _:
                yield prose(getattr(section, "value", ""))


def _items(items: Iterable[Any], found: Any, kind: str) -> Iterator[str]:
    for item in items:
        if kind == "raises":
            yield f"- {_code(f'`{item.annotation}`')}: {line_of(item.description)}"
            continue
        annotation, name = item.annotation, f"`{item.name}`"
        if item.name.endswith(","):
            # Several that share a line: griffe takes what follows the first one for its type.
            names = [item.name.rstrip(","), *str(annotation).strip("()").split(", ")]
            name, annotation = ", ".join(f"`{one}`" for one in names), None
        if kind == "attributes" and annotation is None and item.name in found.members:
            annotation = found.members[item.name].annotation
        typed = f" (`{annotation}`)" if kind == "attributes" and annotation is not None else ""
        default = found.members[item.name].value if kind == "attributes" and item.name in found.members else None
        without = default is None or "field(" in str(default) or "dataclass" not in found.labels
        yield f"- {name}{typed}: {line_of(item.description)}" + ("" if without else f" Default: `{default}`.")


def line_of(text: str) -> str:
    return " ".join(prose(text).split())


def prose(text: str) -> str:
    """A docstring's text as Markdown. Public names in single backticks lead to their entries; no bracket is a tag."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text.strip())
    return "".join(_code(part) if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def _code(part: str) -> str:
    """Code, as a link if it names what has an entry. Double backticks are for arguments and values, which have none."""
    name = part.strip("`")
    anchor = None if part.startswith("``") else _anchors().get(name.removeprefix("onecopy."))
    return f"`{name}`" if anchor is None else f"[`{name}`]({anchor})"


@cache
def _anchors() -> dict[str, str]:
    """Where the entry of each public name and each error is, by its name."""
    found = {}
    for name in public_names():
        kind = "class-" if find(name).is_class else ""
        found[name] = f"onecopy.md#{kind}onecopy{name.replace('.', '')}".lower()
    for path in RETURNED.values():
        found[path.rpartition(".")[2]] = f"onecopy.md#class-{path.rpartition('.')[2]}".lower()
    return found | {name: f"errors.md#{name.lower()}" for name, kind in find("errors").members.items() if kind.is_class}


def _text(docstring: Any) -> str:
    return "" if docstring is None else prose(docstring.value)


def attributes(path: str) -> dict[str, tuple[str, str]]:
    """Of a dataclass below onecopy: each attribute's type and what it is."""
    found = find(path)
    return {
        item.name: (str(found.members[item.name].annotation), line_of(item.description))
        for section in found.docstring.parse(griffe.Parser.google, warnings=False)
        if section.kind.value == "attributes"
        for item in section.value
    }
