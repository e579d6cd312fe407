"""Settings: a config from a TOML file and the command line, and back to commented TOML."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from onecopy.errors import SettingsError
from onecopy.recipes.config import Config, Section

_OWN_WORDS: Final = "Value error, "
"""What pydantic puts before the message of an error that one of the config's own checks raised."""


class Key(NamedTuple):
    """One key of the config."""

    section: str
    name: str
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def sections() -> Iterator[tuple[str, type[Section]]]:
    """The config's tables, in order."""
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        yield name, field.annotation


def keys() -> list[Key]:
    """Every key of the config, in order. Names are unique over all sections."""
    return [Key(section, name, field) for section, table in sections() for name, field in table.model_fields.items()]


def load(path: str | None, overrides: Mapping[str, Any]) -> Config:
    """The config of a TOML file, with some keys replaced.

    Args:
        path: the file; None takes the defaults.
        overrides: values, which may be strings, by ``section.key``; they win over the file.

    Raises:
        SettingsError: if the file cannot be read, or has an unknown key or a wrong value.
    """
    tables = _read(path) if path is not None else {}
    for dotted, value in overrides.items():
        section, name = dotted.split(".")
        tables.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise SettingsError("\n".join(_in_words(error))) from None


def _in_words(error: ValidationError) -> Iterator[str]:
    """One sentence for each key with a wrong value, whatever the number of kinds that it might have been of."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        by_key.setdefault(".".join(map(str, problem["loc"][:2])), []).append(problem)
    for key, problems in by_key.items():
        if (own := problems[0]["msg"]).startswith(_OWN_WORDS):
            yield f"{key}: {own.removeprefix(_OWN_WORDS)}"
            continue
        first, *others = dict.fromkeys(map(_wanted, problems))
        wanted = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
        yield f"{key} {wanted}; found {problems[0]['input']!r}"


def _wanted(problem: ErrorDetails) -> str:
    """What a value must be, by pydantic's name of what is wrong with it."""
    limits = problem.get("ctx", {})
    match problem["type"]:
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "must be a whole number"
        case "float_parsing" | "float_type":
            return "must be a number"
        case "bool_parsing" | "bool_type":
            return "must be true or false"
        case "string_type":
            return "must be text"
        case "list_type":
            return "must be a list of texts"
        case "literal_error":
            return f"must be {limits['expected']}"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}"
        case "greater_than":
            return f"must be above {limits['gt']:g}"
        case "less_than_equal":
            return f"must be at most {limits['le']:g}"
        case "less_than":
            return f"must be below {limits['lt']:g}"
        case "finite_number":
            return "must be a finite number"
        case _:
            return problem["msg"]


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"there is no config file {path!r}; `onecopy train --print-config > {path}` makes one"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read the config file {path!r}: {error}") from None
    known = {key.dotted for key in keys()}
    for section, table in tables.items():
        if section not in Config.model_fields:
            close = [f"[{name}]" for name in get_close_matches(section, Config.model_fields, n=1)]
            meant = close[0] if close else repr(nearest(section).dotted)
            raise SettingsError(f"unknown key {section!r} in {path}; did you mean {meant}?")
        if not isinstance(table, dict):
            raise SettingsError(f"{section!r} in {path} must be a table, [{section}]; found {table!r}")
        for name in table:
            if f"{section}.{name}" not in known:
                wrong = f"{section}.{name}"
                raise SettingsError(f"unknown key {wrong!r} in {path}; did you mean {nearest(wrong).dotted!r}?")
    return tables


def nearest(wrong: str) -> Key:
    """The key whose name is nearest to ``wrong``: by its last part first, for only the section may be wrong."""
    by_name = {key.name: key for key in keys()}
    if close := get_close_matches(wrong.rpartition(".")[2], by_name, n=1):
        return by_name[close[0]]
    by_dotted = {key.dotted: key for key in keys()}
    return by_dotted[get_close_matches(wrong, by_dotted, n=1, cutoff=0.0)[0]]


def dump(config: Config) -> str:
    """The config as TOML, each key below what it means. `load` reads it back."""
    lines: list[str] = []
    for section, table in sections():
        lines += [f"# {table.__doc__}", f"[{section}]"]
        values = getattr(config, section)
        for name, field in table.model_fields.items():
            lines += textwrap.wrap(field.description or "", 100, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{name} = {toml(getattr(values, name))}")
        lines.append("")
    return "\n".join(lines)


def toml(value: bool | float | str | list[str]) -> str:
    # For these types JSON's notation is TOML's too, except for a character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
