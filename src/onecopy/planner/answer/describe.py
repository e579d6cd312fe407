"""Describe: a model as the planner sees it, from a transformers config, a Python path, sizes or a bare count.

Nothing is downloaded and no weights are read: models are built on the meta device or of fake tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.planner.answer.quantised import PACKED, packed
from onecopy.planner.formulas.activations import HIDDEN_COPIES
from onecopy.planner.model.loss import chunks_loss
from onecopy.planner.model.schedule import Unit
from onecopy.planner.model.shape import Shape, Transformer, Work, from_count
from onecopy.planner.model.tensor import KNOWN
from onecopy.planner.quantities import count, parse_count


def describe(model: str, *, sequence: int | None = None) -> Shape:
    """The shape of what ``model`` names.

    Args:
        model: a `transformers` config.json or a directory with one; ``package.module:factory``, a function without
            arguments that makes an `nn.Module`; or a number of parameters.
        sequence: tokens of a sample, for a factory whose model takes token numbers.

    Raises:
        SettingsError: if it is none of these, or cannot be built.
    """
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return from_transformers(path)
    if ":" in model:
        return from_factory(model, sequence=sequence)
    try:
        return from_count(parse_count(model))
    except SettingsError:
        raise SettingsError(
            f"MODEL must be a transformers config.json or a directory with one, a Python path like "
            f"'package.module:factory', or a number of parameters like 7.5e9; found {model!r}"
            + ("; nothing is downloaded: give the path of a config.json on this machine" if "/" in model else "")
        ) from None


def from_transformers(path: Path) -> Shape:
    """The shape of a model of transformers, from its config alone.

    Raises:
        SettingsError: if there is no config, or transformers cannot build the model.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SettingsError(f"found no {str(file)!r}; give a transformers config.json or a directory with one")
    build, values = transformers_builder(file), transformers_config(file).to_dict()
    batch = pixels(values)
    sizes = None if batch else transformer_of(values)
    idle: list[int] = []

    def counted() -> Any:
        model = build()
        idle.append(_idle(model, values))
        return model

    units = _units_of(counted, batch)
    if any(values.get(name) for name in _EXPERTS):
        # Not every expert computes with every token.
        units = [replace(unit, features=0) for unit in units]
    total = sum(unit.all_parameters for unit in units)
    name = f"{path.resolve().name if path.is_dir() else path.name}, {count(total)} parameters"
    if sizes is not None:
        return Shape(name, tuple(units), replace(sizes, idle=idle[0]))
    return Shape(name, tuple(units), None, None if batch is None else _work_of(build, batch))


def pixels(config: Mapping[str, Any], samples: int = 1) -> Callable[[], Any] | None:
    """Makes a batch of images for a model that sees images alone; None for others."""
    size = config.get("image_size")
    if size is None or config.get("vocab_size") or "text_config" in config:
        return None
    height, width = (size, size) if isinstance(size, int) else size

    def batch() -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.zeros(samples, config.get("num_channels", 3), height, width)}

    return batch


def _idle(model: Any, config: Mapping[str, Any]) -> int:
    """Parameters that a token multiplies nothing with: tables that are looked up, and experts that are not chosen."""
    from torch import nn

    places = {
        kind: {p for m in model.modules() if isinstance(m, nn.Embedding) is kind for p in m.parameters(recurse=False)}
        for kind in (True, False)
    }
    tables: int = sum(parameter.numel() for parameter in places[True] - places[False])
    experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    chosen = config.get("num_experts_per_tok") or experts
    if not experts:
        return tables
    routed: int = sum(p.numel() for name, p in model.named_parameters() if "experts" in name.split("."))
    return tables + int(routed * (1 - chosen / experts))


_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in configs of transformers."""


def transformers_config(file: Path) -> Any:
    """The config of transformers in a file, its defaults filled in.

    Raises:
        SettingsError: if transformers cannot read it.
    """
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError:
        raise SettingsError("reading a transformers config needs transformers; pip install 'onecopy[train]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:
        # Of its own kinds too: each model's config checks its values as it likes.
        raise SettingsError(f"transformers cannot read {str(file)!r}: {_in_a_line(error)}") from None
    config.use_cache = False
    return config


def transformers_builder(file: Path) -> Callable[[], Any]:
    """A function that builds the model of a config on torch's default device, with random weights.

    Raises:
        SettingsError: if transformers cannot read the config.
    """
    config = transformers_config(file)
    transformers: Any = import_module("transformers")

    def build() -> Any:
        causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        model = kind.from_config(config)
        if causal:
            model.loss_type = model.loss_type or "ForCausalLM"
        return model

    return build


def transformer_of(config: Mapping[str, Any]) -> Transformer | None:
    """The sizes in a config of transformers, under whatever name its family gives them; None without layers."""

    def first(*names: str) -> int | None:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)

    layers, hidden = first("num_hidden_layers", "n_layer", "num_layers"), first("hidden_size", "n_embd", "d_model")
    if not layers or not hidden:
        return None
    family = str(config.get("model_type", ""))
    copies = next((size for name, size in HIDDEN_COPIES.items() if family.startswith(name)), HIDDEN_COPIES["llama"])
    return Transformer(
        layers,
        hidden,
        first("num_attention_heads", "n_head", "num_heads") or max(1, hidden // 128),
        first("vocab_size") or 0,
        copies,
        first("max_position_embeddings", "n_positions"),
        first("num_key_value_heads"),
        family in KNOWN,
        chunks=chunks_loss(config),
    )


def from_factory(path: str, *, sequence: int | None = None) -> Shape:
    """The shape of what a Python factory makes.

    Activations are measured on fake tensors if the module has an ``example_inputs`` function beside the factory:
    called with the number of samples, it returns a batch (a dict of keyword arguments or a tuple). Else they are not
    known.

    Args:
        path: ``package.module:factory``.
        sequence: handed to ``example_inputs`` as ``sequence=`` if given.

    Raises:
        SettingsError: if the path leads nowhere, or the factory does not make a module.
    """
    build, module = import_factory(path)
    example = getattr(module, "example_inputs", None)
    if sequence is not None and not (callable(example) and "sequence" in signature(example).parameters):
        raise SettingsError(
            f"--seq needs a function example_inputs(samples, sequence) beside the factory {path!r}; leave it out, or "
            f"add one"
        )
    batch: Callable[[], Any] | None = None
    if callable(example):
        batch = partial(example, 1) if sequence is None else partial(example, 1, sequence=sequence)
    units = _units_of(build, batch)
    total = sum(unit.all_parameters for unit in units)
    work = None if batch is None else _work_of(build, batch)
    return Shape(f"{path}, {count(total)} parameters", tuple(units), None, work)


def _work_of(build: Callable[[], Any], batch: Callable[[], Any]) -> Work:
    from onecopy.planner.engine.work import count_work

    with redirect_stdout(sys.stderr):
        return count_work(build, batch)


def import_factory(path: str) -> tuple[Callable[[], Any], Any]:
    """What ``package.module:factory`` names, and its module.

    Raises:
        SettingsError: if it leads nowhere.
    """
    name, _, attribute = path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(name)
    except Exception as error:
        raise SettingsError(f"cannot import {name!r} for the model {path!r}: {_in_a_line(error)}") from None
    build = getattr(module, attribute, None)
    if not callable(build):
        raise SettingsError(f"{name!r} has no function {attribute!r} that makes a model")
    needed = _arguments(build)
    is_model = hasattr(build, "parameters") and not isinstance(build, type)
    if needed or is_model:
        found = f"a model, {type(build).__name__}" if is_model else f"one that needs {', '.join(needed)}"
        raise SettingsError(f"{path!r} must be a function without arguments that makes a model; found {found}")
    return build, module


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that ``function`` cannot be called without."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        taken = signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in taken if one.default is Parameter.empty and one.kind in kinds]


def _units_of(build: Callable[[], Any], batch: Callable[[], Any] | None) -> list[Unit]:
    # Late: torch takes seconds, and most plans need none of it.
    from torch import nn

    from onecopy.planner.engine.fake import on_meta
    from onecopy.planner.engine.simulate import describe_units

    def checked() -> nn.Module:
        try:
            model = build()
        except Exception as error:
            if any(kind in str(error) for kind in PACKED) and (found := packed(on_meta(build))) is not None:
                raise SettingsError(found) from error
            raise SettingsError(f"the model cannot be built: {_in_a_line(error)}{_place(error)}") from error
        if not isinstance(model, nn.Module):
            raise SettingsError(f"the factory must make an nn.Module; found {type(model).__name__}")
        if not any(True for _ in model.parameters()):
            raise SettingsError(f"{type(model).__name__} has no parameters to plan for")
        if (found := packed(model)) is not None:
            raise SettingsError(found)
        return model

    with redirect_stdout(sys.stderr):
        return describe_units(checked, batch, temporaries=True)


def _in_a_line(error: Exception) -> str:
    """What an error of the user's code or files says."""
    kind = "" if isinstance(error, ImportError | OSError | ValueError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def _place(error: Exception) -> str:
    """Where it was raised."""
    last = extract_tb(error.__traceback__)[-1]
    return f" ({last.filename}, line {last.lineno})"
