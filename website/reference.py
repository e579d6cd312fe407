"""Reference: docs/reference/, written from the source: docstrings, the command line, the config, the metrics.

    python website/reference.py            # writes the pages
    python website/reference.py --check    # says which are not as the source has them, and ends with exit code 1

The pages are kept in the repository, so that they can be read there too. `tests/house/test_reference.py` compares them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import griffe

import onecopy
from onecopy.cli.main import make_app
from onecopy.observe.ledger import STATE_OPERATIONS
from onecopy.recipes.account import STEP_VALUES, Summary
from onecopy.recipes.settings import keys, sections
from pages import ROOT

FOLDER: Final = ROOT / "docs/reference"

GROUPS: Final = {
    "Shard a model": ("shard", "Stage", "Precision", "Offload", "Activations", "activations.checkpoint", "tiled"),
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
    """The source of onecopy, read and not imported: integrations are shown whether or not their packages are there."""
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


def pages() -> dict[str, str]:
    """Every page by its name in docs/reference/."""
    return {
        "index.md": _index(),
        "onecopy.md": _names(),
        "integrations.md": _integrations(),
        "errors.md": _errors(),
        "command-line.md": _command_line(),
        "config.md": _config(),
        "metrics.md": _metrics(),
    }


def _index() -> str:
    rows = [
        "# Reference",
        "",
        "These pages are written from the source by `website/reference.py`. They say what each name takes and returns, "
        "and which errors it raises.",
        "",
        "| page | holds |",
        "|---|---|",
        "| [onecopy](onecopy.md) | every name of `import onecopy` |",
        "| [integrations](integrations.md) | names for Hugging Face, Accelerate, Lightning, FSDP2 and DeepSpeed |",
        "| [errors](errors.md) | every error, and the built-in error that it also is |",
        "| [command line](command-line.md) | every command and option of `onecopy` |",
        "| [config](config.md) | every key of `onecopy train` |",
        "| [metrics](metrics.md) | what a run writes into `metrics.jsonl` and `summary.json` |",
    ]
    return "\n".join(rows) + "\n"


def _names() -> str:
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


def _integrations() -> str:
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


def _errors() -> str:
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
            f"- `{name}`: {_line(member.docstring.value)}"
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
                yield _prose(section.value)
            case "parameters" | "attributes" | "raises" | "other parameters":
                title = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Errors"}
                yield f"**{title.get(section.kind.value, 'Arguments')}**"
                yield "\n".join(_items(section.value, found, section.kind.value))
            case "returns" | "yields":
                yield f"**{section.kind.value.title()}** " + " ".join(_line(item.description) for item in section.value)
            case _:
                yield _prose(getattr(section, "value", ""))


def _items(items: Iterable[Any], found: Any, kind: str) -> Iterator[str]:
    for item in items:
        if kind == "raises":
            yield f"- `{item.annotation}`: {_line(item.description)}"
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
        yield f"- {name}{typed}: {_line(item.description)}" + ("" if without else f" Default: `{default}`.")


def _line(text: str) -> str:
    return " ".join(_prose(text).split())


def _prose(text: str) -> str:
    """A docstring's text as Markdown: double backticks say the same as single ones, angle brackets are no tags."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text.strip())
    marked = [f"`{part.strip('`')}`" if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts)]
    return "".join(marked)


def _text(docstring: Any) -> str:
    return "" if docstring is None else _prose(docstring.value)


def _command_line() -> str:
    """Commands and options as Typer has them."""
    import typer

    group: Any = typer.main.get_command(make_app())
    parts = [
        "# Command line",
        "`pip install 'onecopy[train]'` brings the command `onecopy`. Every command has `--help`.",
    ]
    context = group.make_context("onecopy", ["--help"], resilient_parsing=True)
    options = [_option(record) for record in _records(group, context) if "--help" not in record[0]]
    parts += ["\n".join(options)] if options else []
    parts.append(
        "\n".join(
            ["| command | does |", "|---|---|"]
            + [
                f"| [`onecopy {name}`](#onecopy-{name}) | {_line((command.help or '').partition(chr(10) * 2)[0])} |"
                for name, command in group.commands.items()
            ]
        )
    )
    for name, command in group.commands.items():
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        parts += [
            f"## onecopy {name}",
            _prose(inspect.cleandoc(command.help or "")),
            f"```text\nonecopy {name} {' '.join(command.collect_usage_pieces(own)).replace('[[', '[').replace(']]', ']')}\n```",
        ]
        panels: dict[str, list[str]] = {}
        for parameter in command.params:
            record = parameter.get_help_record(own)
            if record is not None and record[0] != "--help":
                title = str(getattr(parameter, "rich_help_panel", None) or "").replace("\\[", "[")
                panels.setdefault(title, []).append(_option(record))
        for title, rows in panels.items():
            parts += ([f"**{title}**"] if title else []) + ["\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _records(command: Any, context: Any) -> Iterator[Sequence[str]]:
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield record


def _option(record: Sequence[str]) -> str:
    name, words = record
    return f"- `{name}`: {_line(words.replace(chr(92) + '[', '['))}"


def _config() -> str:
    parts = [
        "# Config of onecopy train",
        "A config is a TOML file with the tables below. `onecopy train --print-config` prints one with every key, its "
        "default and this text. Each key is also an option of the command line: `--stage 2`, or with its table "
        "`--parallel.stage 2`. An option wins over the file.",
    ]
    for name, table in sections():
        parts += [f"## {name}", _line(table.__doc__ or "")]
        rows = ["| key | default | meaning |", "|---|---|---|"]
        rows += [
            f"| `{key.name}` | `{_toml(key.field.default)}` | {_cell(key.field.description)}{_range(key.field)} |"
            for key in keys()
            if key.section == name
        ]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"') if value != "" else '""'


def _cell(text: str | None) -> str:
    return _line(text or "").replace("|", "\\|")


def _range(field: Any) -> str:
    """The limits of a number, in words."""
    limits = {name: getattr(m, name) for m in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return f" ({', '.join(f'{words[name]} {limit:g}' for name, limit in limits.items())})" if limits else ""


def _metrics() -> str:
    attributes = {
        item.name: item.description
        for section in package()["recipes.account.Summary"].docstring.parse(griffe.Parser.google, warnings=False)
        if section.kind.value == "attributes"
        for item in section.value
    }
    described = {name.strip(): text for names, text in attributes.items() for name in names.split(",")}
    parts = [
        "# Metrics",
        "`onecopy train` writes them into the run's directory. Sizes are bytes, times are seconds. What is not finite "
        "is `null`.",
        "## metrics.jsonl",
        'One JSON object a line. `kind` is `"train"` for an optimizer step and `"evaluation"` for an evaluation after '
        "it. `step` counts from 1. A name with a slash is a part of an object: `memory/optimizer` is "
        '`line["memory"]["optimizer"]`. TensorBoard has the same values under the same names. An evaluation has one '
        "value, `loss`.",
        "\n".join(
            ["| value | meaning |", "|---|---|"]
            + [f"| `{name}` | {_cell(text)} |" for name, text in STEP_VALUES.items()]
        ),
        f"Operations: {', '.join(f'`{name}`' for name in STATE_OPERATIONS)}.",
        "## summary.json",
        "Written when the run ends.",
        "\n".join(
            ["| key | type | meaning |", "|---|---|---|"]
            + [
                f"| `{field.name}` | `{str(field.type).replace('|', chr(92) + '|')}` | {_cell(described.get(field.name))} |"
                for field in fields(Summary)
            ]
        ),
        "Each operation of `bytes_sent_per_step`, and their `total`, has:",
        "\n".join(_attributes("recipes.account.Sent")),
    ]
    return "\n\n".join(parts) + "\n"


def _attributes(path: str) -> Iterator[str]:
    for section in package()[path].docstring.parse(griffe.Parser.google, warnings=False):
        if section.kind.value == "attributes":
            yield from _items(section.value, package()[path], "attributes")


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them; the exit code."""
    written = pages()
    stale = [name for name, text in written.items() if _read(FOLDER / name) != text]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/reference/{name} is not as the source has it: run python website/reference.py")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(written[name], encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
