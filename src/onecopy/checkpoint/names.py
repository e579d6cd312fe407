"""Names: the parameters and buffers of a model by fully qualified name, however the model is wrapped.

A tensor that a model holds under several names (tied weights) goes by the first; the others are its aliases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy.errors import UsageError
from onecopy.sharding.engine.engine import find_engine

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and torch's checkpoint wrapper put into names."""


@dataclass(frozen=True)
class Named:
    """What a model's checkpoint holds.

    Attributes:
        parameters: by name, each once; as the model holds them (plain, SlicedTensor or DTensor).
        buffers: persistent buffers by name, each once.
        aliases: from each further name to the first.
        objects: values that are no tensors: modules' `get_extra_state`.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    objects: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    def name_of(self, parameter: Tensor) -> str:
        """The name of one of the model's parameters, as an optimizer holds it.

        Raises:
            UsageError: if it is none of them.
        """
        for name, own in self.parameters.items():
            if own is parameter:
                return name
        raise UsageError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is none of the model's; pass an "
            "optimizer that you made from model.parameters() after onecopy.shard."
        )


def name_tensors(model: nn.Module) -> Named:
    """Find everything that a checkpoint of ``model`` is to hold."""
    if (engine := find_engine(model)) is not None:
        engine.come_to_rest()
    if isinstance(model, DistributedDataParallel):
        model = model.module
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    objects: dict[str, Any] = {}
    first: dict[int, str] = {}
    for written, value in model.state_dict(keep_vars=True).items():
        name = clean_name(written)
        if not isinstance(value, Tensor):
            objects[name] = value
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            (parameters if isinstance(value, nn.Parameter) else buffers)[name] = value
    return Named(parameters, buffers, aliases, objects)


def check_has_values(named: Named) -> None:
    """Raise `UsageError` if a tensor is on meta, where it could be neither saved nor loaded."""
    for name, tensor in named.tensors.items():
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} is on the meta device and has no values: first call onecopy.materialize(model), before "
                "you make the optimizer, or onecopy.load_pretrained, which gives memory and values"
            )


def clean_name(name: str) -> str:
    """A name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def name_groups(optimizer: Optimizer, named: Named) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in named.parameters.items()}
    return [
        [names.get(id(parameter)) or named.name_of(parameter) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
