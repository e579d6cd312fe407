"""The `onecopy` command. Its imports stay light: torch and transformers load only when there is work for them."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def make_app() -> typer.Typer:
    """The command with its subcommands."""
    import typer

    from onecopy.cli.checkpoint import export, import_deepspeed, inspect
    from onecopy.cli.plan import plan
    from onecopy.cli.report import report
    from onecopy.cli.run import run
    from onecopy.cli.train import train
    from onecopy.cli.tune import tune
    from onecopy.cli.version import version

    app = typer.Typer(
        help="ZeRO for PyTorch: one copy of every model state across the ranks that train it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.command("train")(train)
    app.command("run", context_settings={"allow_interspersed_args": False, "allow_extra_args": True})(run)
    app.command("plan")(plan)
    app.command("tune")(tune)
    app.command("report")(report)
    app.command("inspect")(inspect)
    app.command("export")(export)
    app.command("import-deepspeed")(import_deepspeed)
    app.callback()(version)
    return app


def main() -> None:
    """Entry point of the `onecopy` command."""
    # While there is nothing to close, Ctrl-C ends the process in the kernel: no traceback, and no import swallows it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import typer

        from onecopy.cli.train import short_names
        from onecopy.errors import SettingsError

        app = make_app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "pydantic", "rich"):
            raise
        sys.exit(f"error: the command line needs {error.name}; install it with: pip install 'onecopy[train]'")

    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["train"]:
            arguments = short_names(arguments)
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    app(arguments)


if __name__ == "__main__":
    main()
