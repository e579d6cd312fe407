"""`onecopy train`: one option for every key of the config, made from the config itself."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer

from onecopy.errors import CheckpointError, NotFiniteError, SettingsError, WriteError
from onecopy.recipes.config import Config
from onecopy.recipes.settings import Key, dump, keys, load, nearest, sections


def short_names(arguments: list[str]) -> list[str]:
    """The arguments of `train` with every ``--section.key`` written as the option it means, ``--key``.

    Raises:
        SettingsError: if there is no such option; it names the nearest.
    """
    return [_short_name(argument) if argument.startswith("--") else argument for argument in arguments]


def _short_name(argument: str) -> str:
    written, equals, value = argument.partition("=")
    dotted = written[2:].replace("-", "_")
    name = dotted.rpartition(".")[2]
    known = {option for key in keys() for option in (key.name, key.dotted)}
    if dotted not in known | {"", "help", "print_config"}:
        raise SettingsError(f"unknown option '{written}'; did you mean '{_flag(nearest(dotted).name)}'?")
    return _flag(name) + equals + value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(key: Key) -> inspect.Parameter:
    """The command line's parameter for one key. Values stay text, which the config parses."""
    repeats = key.field.annotation == list[str]
    default = str(key.field.default).lower() if key.field.default not in ("", []) else "empty"
    again = " May be given several times." if repeats else ""
    option = typer.Option(
        _flag(key.name),
        help=_plain(f"{key.field.description}{again} [default: {default}]"),
        metavar=_metavar(key.field.annotation),
        rich_help_panel=_plain(f"[{key.section}] {dict(sections())[key.section].__doc__}"),
        show_default=False,
    )
    return inspect.Parameter(
        key.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None if repeats else str | None, option],
    )


def _plain(text: str) -> str:
    """Text whose brackets are not markup."""
    return text.replace("[", "\\[")


def _metavar(kind: Any) -> str:
    parts = get_args(kind)
    match get_origin(kind):
        case typing.Literal:
            return "|".join(parts)
        case typing.Annotated:
            return _metavar(parts[0])
        case typing.Union | types.UnionType:
            return "|".join(map(_metavar, parts))
    return {int: "INT", float: "NUMBER", bool: "true|false", list[str]: "PATH"}.get(kind, "TEXT")


def _with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` an option for every key; what was set reaches it as ``overrides``."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "overrides"]
    dotted = {key.name: key.dotted for key in keys()}

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in dotted}
        overrides = {dotted[name]: value for name, value in given.items() if value is not None}
        command(**values, overrides=overrides)

    parameters = [*own, *map(_option, keys())]
    run.__doc__ = command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010  (mypy knows no such attribute)
    return run


@_with_config_options
def train(
    config_file: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.TOML]", help="A config file; options override it.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config as TOML with comments, and stop.")
    ] = False,
    *,
    overrides: dict[str, Any],
) -> None:
    """Train a causal language model.

    Without arguments it trains a small GPT-2 on the text of Python's own documentation, at stage 3 over 2 ranks.

    The command starts its ranks itself. Under torchrun it is one of the ranks that torchrun started.

    An option may also be written with its section, as in --parallel.stage 3.
    """
    try:
        config: Config = load(config_file, overrides)
        if print_config:
            sys.stdout.write(dump(config))
            return
        from onecopy.recipes.launch import launch

        code = launch(config, sys.argv[1:])
    except (SettingsError, CheckpointError, NotFiniteError, WriteError) as error:
        typer.echo(f"error: {error}", err=True)
        code = 2 if isinstance(error, SettingsError) else 1
    raise typer.Exit(code)
