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
            help="A config.json of transformers, or a directory with one; or package.module:factory; or a number of "
            "parameters (7.5e9, 7.5B). If you leave it out, give --layers and --hidden.",
        ),
    ] = None,
    layers: Annotated[int | None, _option("Transformer blocks, instead of MODEL.", "INT", _MODEL)] = None,
    hidden: Annotated[int | None, _option("Width, instead of MODEL.", "INT", _MODEL)] = None,
    heads: Annotated[int | None, _option("Attention heads; hidden / 128 if not given.", "INT", _MODEL)] = None,
    vocabulary: Annotated[int, _option("Tokens of the vocabulary, with --layers.", "INT", _MODEL)] = 50_304,
    seq: Annotated[int | None, _option("Tokens in a sample; 2048 if not given.", "INT", _MODEL)] = None,
    micro_batch: Annotated[
        int | None, _option("Samples that a rank computes at once; searched if not given.", "INT", _MODEL)
    ] = None,
    global_batch: Annotated[
        int | None, _option("Samples in a step; if not given, one micro-batch for each rank.", "INT", _MODEL)
    ] = None,
    stage: Annotated[int | None, _option("Plan only this stage; all stages if not given.", "INT", _MODEL)] = None,
    checkpointing: Annotated[
        str | None,
        _option(
            "Plan only one kind of recomputation: off; selective (keep what matrix products and attention return); "
            "units (keep only the inputs of blocks); P_a (and cut them over tensor ranks); units+cpu or P_a+cpu (and "
            "off the device).",
            "TEXT",
            _MODEL,
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        _option("Tensor-parallel ranks, within a node; 1, 2, 4, ... are searched if not given.", "INT", _MODEL),
    ] = None,
    precision: Annotated[
        str | None, _option("bf16, bf16-lean, fp16 or fp32; bf16 if not given.", "TEXT", _MODEL)
    ] = None,
    optimizer: Annotated[
        str, _option("AdamW's implementation: fused, foreach, for-loop; or muon.", "TEXT", _MODEL)
    ] = "fused",
    loss: Annotated[
        str,
        _option("chunked (onecopy.chunk_loss, if the model can) or whole (all logits at once).", "TEXT", _MODEL),
    ] = "chunked",
    gpus: Annotated[int | None, _option("GPUs on all nodes together.", "INT", _MACHINE)] = None,
    nodes: Annotated[int, _option("Number of hosts.", "INT", _MACHINE)] = 1,
    gpu: Annotated[str, _option("Kind of GPU: h100, a100, v100, rtx4090, mi300x, …", "TEXT", _MACHINE)] = "h100",
    tflops: Annotated[
        float | None, _option("Dense 16-bit speed of one GPU; that of its kind if not given.", "TFLOP/S", _MACHINE)
    ] = None,
    gpu_memory: Annotated[
        str | None, _option("Memory of one GPU, like 24GB; that of its kind if not given.", "SIZE", _MACHINE)
    ] = None,
    host_memory: Annotated[str | None, _option("Memory of one host, like 256GB.", "SIZE", _MACHINE)] = None,
    link: Annotated[str, _option("Bandwidth from each GPU to other nodes.", "RATE", _MACHINE)] = "400gbit",
    intra: Annotated[str | None, _option("Bandwidth from each GPU within its node.", "RATE", _MACHINE)] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Read this machine, and measure it shortly.", rich_help_panel=_MACHINE)
    ] = False,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration/--no-calibration",
            help="With --here, the constants that `onecopy tune` has measured on this machine.",
            rich_help_panel=_MACHINE,
        ),
    ] = True,
    preset: Annotated[str, _option("safe (15 % of memory stays free), fast, or frugal.", "TEXT", _SHOW)] = "fast",
    zero_r: Annotated[
        bool,
        typer.Option(
            "--zero-r",
            help="Plan the five configurations of ZeRO's Table 3 (C1 to C5) for MODEL; without it, for the paper's.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    sweep: Annotated[str | None, _option("Show step times over a range: link=10gbit..800gbit.", "RANGE", _SHOW)] = None,
    copies: Annotated[
        int | None, _option("Show what this many copies of each slice cost and save.", "INT", _SHOW)
    ] = None,
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror",
            help="Show what a mirror, two copies and checkpoints cost and save, from 8 to 4,096 ranks.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    losses_a_day: Annotated[
        float | None,
        _option("Beside --mirror: ranks lost a day; one in 50,700 device-hours if not given.", "NUMBER", _SHOW),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the engine on fake tensors beside the formulas.", rich_help_panel=_SHOW),
    ] = False,
    from_deepspeed: Annotated[
        Path | None, _option("Plan with the settings of a DeepSpeed JSON file.", "FILE", _SHOW)
    ] = None,
    from_accelerate: Annotated[
        Path | None, _option("Plan with the FSDP settings of an Accelerate YAML file.", "FILE", _SHOW)
    ] = None,
    rows: Annotated[int, _option("Rows of the table.", "INT", _SHOW)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.", rich_help_panel=_SHOW)] = False,
    html: Annotated[Path | None, _option("Write a page with charts.", "FILE", _SHOW)] = None,
) -> None:
    """Plan a training run: the memory, traffic and time of every option, and which one to take.

    It needs no GPU and no network. Exit code 1 means that nothing fits.
    """
    from onecopy.cli.plan_run import Request, run

    values = {name: value for name, value in locals().items() if name in Request.__dataclass_fields__}
    try:
        fits = run(Request(**values))
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if fits else 1)
