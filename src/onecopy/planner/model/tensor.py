"""Tensor: what tensor parallelism over M ranks leaves of a model on each, and the degrees that a model allows.

As `recipes/tensor_parallel.py` does it: the heads and the MLP of each block are cut, embeddings, norms and the head of
the language model stay whole. ZeRO divides all of a model by M (§3.1), which is the limit for many blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.schedule import Unit
from onecopy.planner.model.shape import Shape, is_block

KNOWN: Final = ("gpt2", "llama", "mistral", "qwen2")
"""`model_type`s of transformers whose blocks onecopy's training job can cut."""


def check_tensor_parallel(settings: Mapping[str, Any], ranks: int, *, sequence: bool = False) -> str | None:
    """Why a model cannot be spread over ``ranks``, None if it can.

    Args:
        settings: the model's config, as in its config.json.
        sequence: along the sequence and the vocabulary too.
    """
    kind = settings.get("model_type")
    if kind not in KNOWN:
        return f"parallel.tensor knows models of type {', '.join(KNOWN)}; this one is {kind!r}: set it to 1"
    heads = settings.get("n_head", settings.get("num_attention_heads"))
    for name, count in (("attention", heads), ("key and value", settings.get("num_key_value_heads"))):
        if count is not None and count % ranks:
            return f"parallel.tensor ({ranks}) must divide the model's {count} {name} heads"
    if sequence and settings["vocab_size"] % ranks:
        return (
            f"parallel.tensor ({ranks}) must divide the model's {settings['vocab_size']} tokens for parallel.sequence"
        )
    return None


def degrees(shape: Shape, machine: Machine) -> list[int]:
    """1, 2, 4, 8, ... as far as they divide the model's heads and the GPUs of a node."""
    found = [1]
    while _problem(shape, machine, 2 * found[-1]) is None:
        found.append(2 * found[-1])
    return found


def check_degree(shape: Shape, machine: Machine, tensor: int) -> None:
    """See that ``tensor`` ranks can share the model.

    Raises:
        SettingsError: if they cannot.
    """
    if (problem := _problem(shape, machine, tensor)) is not None:
        raise SettingsError(f"a tensor degree of {tensor} {problem}")


def _problem(shape: Shape, machine: Machine, tensor: int) -> str | None:
    sizes = shape.transformer
    if tensor < 1:
        return "must be positive"
    if tensor == 1:
        return None
    if sizes is None or not sizes.spreads:
        return f"needs a model whose blocks onecopy can cut: {', '.join(KNOWN)}, or sizes; this is {shape.name}"
    for heads in (sizes.heads, sizes.key_value_heads or sizes.heads):
        if heads % tensor:
            return f"must divide the model's {heads} heads"
    if machine.per_node % tensor:
        return f"must divide the {machine.per_node} GPUs of a node: its messages are too many for links between nodes"
    return None


def cut(units: list[Unit], hidden: int, tensor: int, *, ends: bool = False) -> list[Unit]:
    """The units as one of ``tensor`` ranks holds them; what they keep for backward stays as it is.

    Of a block every parameter of more than ``hidden`` elements is cut; norms and the biases of what is summed over
    ranks stay whole.

    Args:
        ends: embedding and head are cut too, along the vocabulary.
    """
    return [
        replace(unit, numels=_cut(unit.numels, hidden, tensor), frozen=_cut(unit.frozen, hidden, tensor))
        if ends or is_block(unit)
        else unit
        for unit in units
    ]


def _cut(numels: tuple[int, ...], hidden: int, tensor: int) -> tuple[int, ...]:
    return tuple(numel if numel <= hidden else -(-numel // tensor) for numel in numels)
