"""`onecopy inspect`, `onecopy export` and `onecopy import-deepspeed`: checkpoints from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onecopy.errors import CheckpointError, SettingsError
from onecopy.untrusted import printable

if TYPE_CHECKING:
    from onecopy.checkpoint.inspect import Inspected

_SOURCE = typer.Argument(
    metavar="CHECKPOINT", help="A checkpoint, or a directory of checkpoints, of which the newest whole one is taken."
)


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint or a directory of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Check only the sizes of files, not every byte.")] = False,
) -> None:
    """Show what is in a checkpoint, whether it is whole, and who can load it.

    Exit code 0: all checkpoints that were checked are whole. 1: one is damaged. 2: there is no checkpoint.
    """
    from onecopy.checkpoint.inspect import inspect as look

    with _errors():
        found = look(directory, check=not quick)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1, default=str))
    else:
        for one in found:
            _print(one, detailed=len(found) == 1, checked="sizes alone" if quick else "every byte")
    raise typer.Exit(1 if any(one.damage for one in found) else 0)


def export(
    checkpoint: Annotated[Path, _SOURCE],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is new or empty.")],
    dtype: Annotated[
        str, typer.Option(metavar="saved|fp32|bf16|fp16", help="Dtype of the weights; 'saved': as the master weights.")
    ] = "saved",
    file_size: Annotated[float, typer.Option(metavar="GB", help="Most GB (1e9 bytes) in one file.")] = 5.0,
    asset: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file to put beside the weights, such as config.json. May repeat."),
    ] = None,
) -> None:
    """Write a checkpoint's weights as Hugging Face safetensors, with its config and tokenizer."""
    from onecopy.checkpoint.export import DTYPES, export

    with _errors():
        if dtype not in DTYPES:
            raise SettingsError(f"--dtype must be one of {', '.join(DTYPES)}; found {dtype!r}")
        if not 0 < file_size < inf:
            raise SettingsError(f"--file-size must be a number above 0; found {file_size:g}")
        done = export(checkpoint, out, dtype=DTYPES[dtype], file_bytes=int(file_size * 1e9), assets=asset or ())
    typer.echo(f"{done.source}, step {done.step}: {done.parameters:,} elements")
    for name, size in done.files.items():
        typer.echo(f"{out / name}  {_size(size)}")
    if "config.json" not in done.files:
        typer.echo("no config.json was saved with the checkpoint; transformers needs one: --asset PATH/config.json")


def import_deepspeed(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="What DeepSpeed's save_checkpoint wrote: the directory with `latest`, or that of one tag.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory of onecopy checkpoints; it may be new.")],
) -> None:
    """Convert a ZeRO checkpoint of DeepSpeed (stage 1, 2 or 3) into one of onecopy: weights and optimizer states."""
    from onecopy.checkpoint.deepspeed import import_deepspeed as convert

    with _errors():
        done = convert(directory, out)
    typer.echo(f"{done.path}: step {done.step}, stage {done.stage} of {done.ranks} ranks, {done.parameters:,} elements")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (SettingsError, CheckpointError) as error:
        typer.echo("\n".join(map(printable, f"error: {error}".splitlines())), err=True)
        raise typer.Exit(2) from None


def _print(one: Inspected, *, detailed: bool, checked: str) -> None:
    state = f"whole ({checked} checked)" if one.damage is None else f"DAMAGED: {one.damage}"
    _say(f"{one.path}{'  (latest)' if one.latest else ''}")
    _say(f"  {state}")
    if one.damage is not None:
        return
    assert one.nbytes is not None
    assert one.saved_by is not None
    _say(f"  step {one.step}, {_size(one.nbytes)} in {len(one.files or {})} files")
    if not detailed:
        return
    by = ", ".join(f"{name} {value}" for name, value in one.saved_by.items() if value is not None)
    _say(f"  saved by {one.ranks} rank{'s' * (one.ranks != 1)}: {by}")
    for name, section in (one.sections or {}).items():
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in section.dtypes.items())
        _say(f"  {name}: {section.tensors} tensors, {_size(section.nbytes)} ({dtypes or 'none'})")
    for alias, name in (one.tied or {}).items():
        _say(f"  tied: {alias} is {name}")
    for number, group in enumerate(one.groups or []):
        _say(f"  group {number}: {_words(group)}")
    if one.parts:
        _say(f"  also: {', '.join(one.parts)}")
    for line in one.loads_in or []:
        _say(f"  loads in {line}")


def _say(line: str) -> None:
    # Names and notes in it may be a stranger's.
    typer.echo(printable(line))


def _words(group: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in group.items())


def _size(count: float) -> str:
    """Bytes for people, with powers of ten."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:,.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} GB"
