"""`onecopy --version`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from onecopy.version import __version__


def _tell(wanted: bool) -> None:
    if wanted:
        # From the package's metadata: importing torch takes seconds.
        typer.echo(f"onecopy {__version__}, torch {metadata.version('torch')}")
        raise typer.Exit


def version(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Print the versions of onecopy and torch.")
    ] = False,
) -> None:
    """Options that go before a command."""
