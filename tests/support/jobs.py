"""A small training job on forked CPU ranks: its config, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# What every rank would otherwise import for itself.
from transformers import GPT2LMHeadModel  # noqa: F401

from onecopy.recipes.settings import load
from onecopy.recipes.train import train
from onecopy.recipes.world import World
from ranks import run_ranks

CPU = torch.device("cpu")
SMALL = {
    "model.layers": 2,
    "model.hidden": 24,
    "model.heads": 2,
    "data.tokenizer": "bytes",
    "data.sequence_length": 16,
    "data.batch": 12,
    "optimizer.learning_rate": 0.01,
    "evaluation.evaluate_every": 4,
    "run.tensorboard": False,
    "run.seed": 5,
    "parallel.device": "cpu",
}


def run_job(directory: Path, size: int, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records and the summary of a run on ``size`` ranks with ``settings``, by dotted name, over `SMALL`."""
    config = load(None, {**SMALL, "parallel.ranks": size, "run.directory": str(directory), **settings})

    def rank_main(rank: int) -> bool:
        return train(config, World(rank, rank, size, CPU))

    assert run_ranks(size, rank_main, group=size > 1) == [True] * size
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return records, json.loads((directory / "summary.json").read_text())


def dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments such as ``parallel__stage`` as the config's names."""
    return {name.replace("__", "."): value for name, value in overrides.items()}
