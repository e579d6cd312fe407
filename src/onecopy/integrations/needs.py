"""Needs: packages that an integration works with, asked for where they are used and not before."""

from __future__ import annotations

from importlib.util import find_spec

from onecopy.errors import MissingPackageError


def needs(integration: str, *packages: str) -> str:
    """The first of ``packages`` that is installed.

    Raises:
        MissingPackageError: if none is; says how to install it.
    """
    for package in packages:
        if find_spec(package) is not None:
            return package
    raise MissingPackageError(
        f"{integration} works with the package {' or '.join(packages)}, which is not installed; install it with: "
        f"pip install 'onecopy[integrations]'"
    )
