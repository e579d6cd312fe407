"""Reference: docs/reference/, written from the source: docstrings, the command line, the config, the metrics.

    python website/reference.py            # writes the pages
    python website/reference.py --check    # says which are not as the source has them, and ends with exit code 1

The pages are kept in the repository, so that they can be read there too. `tests/house/test_reference.py` compares them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer

from names import attributes, errors, integrations, line_of, names, prose
from onecopy.cli.main import make_app
from onecopy.observe.ledger import STATE_OPERATIONS
from onecopy.recipes.account import STEP_VALUES
from onecopy.recipes.metrics import EVENT_VALUES
from onecopy.recipes.settings import keys, sections
from pages import ROOT

FOLDER: Final = ROOT / "docs/reference"


@cache
def pages() -> dict[str, str]:
    """Every page by its name in docs/reference/."""
    return {
        "index.md": _index(),
        "onecopy.md": names(),
        "integrations.md": integrations(),
        "errors.md": errors(),
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


def _command_line() -> str:
    """Commands and options as Typer has them."""
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
                f"| [`onecopy {name}`](#onecopy-{name}) | {line_of((command.help or '').partition(chr(10) * 2)[0])} |"
                for name, command in group.commands.items()
            ]
        )
    )
    for name, command in group.commands.items():
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join(["onecopy", name, *command.collect_usage_pieces(own)]).replace("[[", "[").replace("]]", "]")
        parts += [
            f"## onecopy {name}",
            prose(inspect.cleandoc(command.help or "")),
            f"```text\n{usage}\n```",
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
    return f"- `{name}`: {line_of(words.replace(chr(92) + '[', '['))}"


def _config() -> str:
    parts = [
        "# Config of onecopy train",
        "A config is a TOML file with the tables below. `onecopy train --print-config` prints one with every key, its "
        "default and this text. Each key is also an option of the command line: `--stage 2`, or with its table "
        "`--parallel.stage 2`. An option wins over the file.",
    ]
    for name, table in sections():
        parts += [f"## {name}", line_of(table.__doc__ or "")]
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
    return line_of(text or "").replace("|", "\\|")


def _range(field: Any) -> str:
    """The limits of a number, in words."""
    limits = {name: getattr(m, name) for m in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return f" ({', '.join(f'{words[name]} {limit:g}' for name, limit in limits.items())})" if limits else ""


def _metrics() -> str:
    values = ["| value | meaning |", "|---|---|"]
    values += [f"| `{name}` | {_cell(meaning)} |" for name, meaning in STEP_VALUES.items()]
    events = ["| kind | value | meaning |", "|---|---|---|"]
    events += [
        f"| `{kind}` | `{name}` | {_cell(meaning)} |"
        for kind, meanings in EVENT_VALUES.items()
        for name, meaning in meanings.items()
    ]
    parts = [
        "# Metrics",
        "`onecopy train` writes them into the run's directory. Sizes are bytes, times are seconds. What is not finite "
        "is `null`.",
        "## metrics.jsonl",
        'One JSON object a line. `kind` is `"train"` for an optimizer step and `"evaluation"` for an evaluation after '
        "it. `step` counts from 1. A name with a slash is a part of an object: `memory/optimizer` is "
        '`line["memory"]["optimizer"]`. TensorBoard has the same values under the same names. An evaluation has one '
        "value, `loss`.",
        "\n".join(values),
        f"Operations: {', '.join(f'`{name}`' for name in STATE_OPERATIONS)}.",
        "With `[recovery]` there is a line of kind `recovery` for each loss that was made good, and one of kind `slow` "
        "for each time that a rank did not answer for a while. `step` is the one that was made after it.",
        "\n".join(events),
        "## summary.json",
        "Written when the run ends.",
        "\n".join(_table("recipes.account.Summary")),
        "Each operation of `bytes_sent_per_step`, and their `total`, has:",
        "\n".join(_table("recipes.account.Sent")),
    ]
    return "\n\n".join(parts) + "\n"


def _table(path: str) -> Iterator[str]:
    yield from ("| key | type | meaning |", "|---|---|---|")
    for name, (kind, meaning) in attributes(path).items():
        yield f"| `{name}` | `{_cell(kind)}` | {_cell(meaning)} |"


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
