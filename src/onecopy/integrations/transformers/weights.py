"""Weights of sharded models in the formats of transformers and PEFT: every rank writes and reads its own slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onecopy.checkpoint.group import Group
from onecopy.checkpoint.load import load
from onecopy.checkpoint.names import name_tensors
from onecopy.checkpoint.pretrained import load_pretrained
from onecopy.checkpoint.save_pretrained import save_pretrained, save_tensors
from onecopy.sharding.setup.whole import gathered

STATE = "onecopy"
"""The directory inside a Trainer's checkpoint that holds what training goes on with."""


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """PEFT's settings of each adapter, by its name; none of a model without PEFT."""
    found: dict[str, Any] = getattr(model, "peft_config", {}) if find_spec("peft") is not None else {}
    return found


def writes_slices(model: nn.Module) -> bool:
    """Whether slices can be written as they are: of transformers' models, and of PEFT's adapters but for prompts."""
    if adapters := adapters_of(model):
        return not any(config.is_prompt_learning for config in adapters.values())
    return isinstance(model, PreTrainedModel)


def placeholders(model: nn.Module) -> dict[str, Tensor]:
    """What a model's own `save_pretrained` is given in place of weights: PEFT looks for its adapters' names."""
    return {name: torch.zeros(1) for name in model.state_dict()} if adapters_of(model) else {}


def write_slices_together(model: nn.Module, directory: Path) -> None:
    """Write the model's weights, or those of its adapters alone, into ``directory``. Every rank calls it.

    It begins once all ranks have written what else they write there, a weights file of placeholders among it.
    """
    Group.current().together("saving a model", lambda: None)
    adapters = adapters_of(model)
    if not adapters:
        save_pretrained(model, directory)
        return
    from peft import get_peft_model_state_dict

    named = name_tensors(model)
    tensors = named.tensors | {alias: named.tensors[name] for alias, name in named.aliases.items()}
    for name in adapters:
        own: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False
        )
        # As PEFT lays adapters out.
        save_tensors(own, directory if name == "default" else directory / name, stem="adapter_model")


def read_weights(model: nn.Module, directory: Path) -> None:
    """Load weights from a checkpoint of a Trainer, sharded or not. Every rank calls it, and reads what it holds."""
    if (directory / STATE).is_dir():
        load(directory / STATE, model)
    elif adapters := adapters_of(model):
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        with gathered(model, write=True):
            for name in adapters:
                own = load_peft_weights(str(directory if name == "default" else directory / name), device="cpu")
                set_peft_model_state_dict(model, own, adapter_name=name)
    else:
        load_pretrained(model, directory, strict=False)


@contextmanager
def whole_for_saving(model: nn.Module) -> Iterator[None]:
    """All weights on every rank, for models that save themselves in a way of their own."""
    with gathered(model):
        yield
