"""`onecopy plan`: which stage, will it fit, what will it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onecopy.errors import SettingsError


def _option(help: str, metavar: str | None = None, panel: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel=panel, show_default=True)


_MODEL, _MACHINE, _SHOW = "Model and job", "Machine", "What to show"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A transformers config.json or a directory with one; package.module:factory; or a number of "
            "parameters (7.5e9, 7.5B). Left out: give --layers and --hidden.",
        ),
    ] = None,
    layers: Annotated[int | None, _option("Transformer blocks, instead of MODEL.", "INT", _MODEL)] = None,
    hidden: Annotated[int | None, _option("Width, instead of MODEL.", "INT", _MODEL)] = None,
    heads: Annotated[int | None, _option("Attention heads; hidden / 128 if not given.", "INT", _MODEL)] = None,
    vocabulary: Annotated[int, _option("Tokens, beside --layers.", "INT", _MODEL)] = 50_304,
    seq: Annotated[int | None, _option("Tokens in a sample; 2048 if not given.", "INT", _MODEL)] = None,
    micro_batch: Annotated[
        int | None, _option("Samples of a rank at once; searched if not given.", "INT", _MODEL)
    ] = None,
    global_batch: Annotated[
        int | None, _option("Samples in a step; one micro-batch a rank if not given.", "INT", _MODEL)
    ] = None,
    stage: Annotated[int | None, _option("Only this stage.", "INT", _MODEL)] = None,
    checkpointing: Annotated[str | None, _option("Only off, units, units+cpu, P_a or P_a+cpu.", "TEXT", _MODEL)] = None,
    tensor: Annotated[
        int | None,
        _option("Ranks of a node that share each sample and block; 1, 2, 4, ... searched if not given.", "INT", _MODEL),
    ] = None,
    precision: Annotated[
        str | None, _option("bf16, bf16-lean, fp16 or fp32; bf16 if not given.", "TEXT", _MODEL)
    ] = None,
    optimizer: Annotated[str, _option("AdamW's implementation: fused, foreach, for-loop.", "TEXT", _MODEL)] = "fused",
    gpus: Annotated[int | None, _option("On all nodes.", "INT", _MACHINE)] = None,
    nodes: Annotated[int, _option("Hosts.", "INT", _MACHINE)] = 1,
    gpu: Annotated[str, _option("Kind: h100, a100, v100, rtx4090, mi300x, …", "TEXT", _MACHINE)] = "h100",
    tflops: Annotated[
        float | None, _option("Dense 16-bit, of one GPU; the kind's if not given.", "TFLOP/S", _MACHINE)
    ] = None,
    gpu_memory: Annotated[
        str | None, _option("Of one GPU, like 24GB; the kind's if not given.", "SIZE", _MACHINE)
    ] = None,
    host_memory: Annotated[str | None, _option("Of one host, like 256GB.", "SIZE", _MACHINE)] = None,
    link: Annotated[str, _option("What each GPU can send to other nodes.", "RATE", _MACHINE)] = "400gbit",
    intra: Annotated[str | None, _option("What each GPU can send within its node.", "RATE", _MACHINE)] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Read this machine, and measure it shortly.", rich_help_panel=_MACHINE)
    ] = False,
    preset: Annotated[str, _option("safe (15 % of memory stays free), fast, or frugal.", "TEXT", _SHOW)] = "fast",
    zero_r: Annotated[
        bool,
        typer.Option(
            "--zero-r",
            help="C1 to C5 of ZeRO's Table 3 for the model; without one, for those that the paper ran.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    sweep: Annotated[str | None, _option("Step times over link=10gbit..800gbit.", "RANGE", _SHOW)] = None,
    copies: Annotated[int | None, _option("What so many copies of each slice cost and save.", "INT", _SHOW)] = None,
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror",
            help="What mirror, two copies and checkpoints cost and save, from 8 to 4,096 ranks.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    losses_a_day: Annotated[
        float | None, _option("Beside --mirror; one in 50,700 device-hours if not given.", "NUMBER", _SHOW)
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the engine on fake tensors beside the formulas.", rich_help_panel=_SHOW),
    ] = False,
    from_deepspeed: Annotated[
        Path | None, _option("Translate a DeepSpeed JSON, and plan with it.", "FILE", _SHOW)
    ] = None,
    from_accelerate: Annotated[
        Path | None, _option("Translate the FSDP settings of an Accelerate YAML, and plan with them.", "FILE", _SHOW)
    ] = None,
    rows: Annotated[int, _option("Options in the table.", "INT", _SHOW)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.", rich_help_panel=_SHOW)] = False,
    html: Annotated[Path | None, _option("Write a page with charts.", "FILE", _SHOW)] = None,
) -> None:
    """Plan a training: every option's memory, traffic and time, and which to take.

    It needs no GPU and no network. Exit code 1 says that nothing fits.
    """
    from onecopy.cli.plan_run import Request, run

    values = {name: value for name, value in locals().items() if name in Request.__dataclass_fields__}
    try:
        fits = run(Request(**values))
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if fits else 1)
