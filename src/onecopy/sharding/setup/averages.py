"""ema: an exponential moving average of a model's parameters, held in slices like the parameters themselves.

It is the recipe of torch's `swa_utils` and of timm (average = decay * average + (1 - decay) * parameter, after each
step), without a second copy of the model: each rank averages the elements that it holds, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.errors import SettingsError, UsageError
from onecopy.sharding.engine.engine import find_engine


class Ema:
    """The moving average of a model's parameters; `ema` makes one.

    Attributes:
        model: the model.
        decay: weight of the average in each update, or a function from the number of earlier updates to that weight.
        updates: how often `update` was called.
        averages: by name of the parameter its average, at least fp32: a slice where the parameter is one.
    """

    def __init__(self, model: nn.Module, decay: float | Callable[[int], float]) -> None:
        self.model = model
        self.decay = decay
        self.updates = 0
        self.averages: dict[str, Tensor] = {
            name: _wide(parameter.detach()) for name, parameter in self._parameters().items()
        }

    def update(self) -> None:
        """Add the parameters to the average. Call it after `optimizer.step()`. It sends nothing."""
        weight = 1.0 - _checked(self.decay(self.updates) if callable(self.decay) else self.decay)
        parameters = self._parameters()
        self._check_names(parameters)
        current = [parameter.detach().to(self.averages[name].dtype) for name, parameter in parameters.items()]
        if current:
            torch._foreach_lerp_([self.averages[name] for name in parameters], current, weight)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the averages as its parameters: evaluate, generate or export inside the `with` block.

        Afterwards the parameters are bit for bit what they were. Buffers stay the model's own. Memory: the parameters'
        slices once more.

        Yields:
            the model.

        Raises:
            UsageError: if parameters were changed inside the block, a step of an optimizer among that.
        """
        parameters = self._parameters()
        self._check_names(parameters)
        kept = [parameter.detach().clone() for parameter in parameters.values()]
        _set(parameters, self.averages)
        shown = self._changes(parameters)
        try:
            yield self.model
        finally:
            changed = self._changes(parameters) != shown
            _set(parameters, dict(zip(parameters, kept, strict=True)))
        if changed:
            raise UsageError(
                "parameters were changed while the model showed their averages, and the changes are lost: train "
                "outside of `with ema.applied():`."
            )

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, as `model.state_dict()` has parameters, and the number of updates."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned: slices of the same layout, or whole tensors.

        Raises:
            UsageError: if names or shapes are not those of the model.
        """
        self._check_names(state["averages"])
        for name, value in state["averages"].items():
            if value.shape != self.averages[name].shape:
                raise UsageError(
                    f"the average of {name!r} has shape {tuple(value.shape)}, but in the model it has "
                    f"{tuple(self.averages[name].shape)}: load the averages of a model with the same shapes."
                )
            self.averages[name].copy_(value)
        self.updates = int(state["updates"])

    def _parameters(self) -> dict[str, nn.Parameter]:
        if (engine := find_engine(self.model)) is not None:
            engine.come_to_rest()
            if engine.gathered:
                raise UsageError("inside onecopy.gathered parameters are whole: use the average outside of it.")
        return {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}

    def _check_names(self, found: Mapping[str, object]) -> None:
        if missing := sorted(set(self.averages) ^ set(found)):
            raise UsageError(
                f"averages and parameters have other names: {', '.join(missing[:5])} occur only on one side. Use an "
                "average that was made from this model."
            )

    def _changes(self, parameters: Mapping[str, nn.Parameter]) -> list[int]:
        engine = find_engine(self.model)
        if engine is None:
            return [parameter._version for parameter in parameters.values()]
        return [bucket.changes for unit in engine.units for bucket in unit.buckets]


def ema(model: nn.Module, decay: float | Callable[[int], float] = 0.999) -> Ema:
    """Keep a moving average of parameters: `average = onecopy.ema(model, 0.999)`, `average.update()` each step.

    ``model`` is sharded, at any stage, or plain. Call this after `onecopy.shard` and after you have loaded weights: the
    average starts from the parameters as they are. Memory: one fp32 slice of the parameters.

    Args:
        decay: weight of the average in each update, between 0 and 1; or a function from the number of earlier updates
            to that weight.

    Returns:
        The `Ema`. It counts no update before the first call of its `update`.

    Raises:
        SettingsError: if ``decay`` is out of range, or the model is on the meta device.
    """
    if not callable(decay):
        _checked(decay)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SettingsError(
            "the model is on the meta device and has no values yet: call onecopy.ema after onecopy.materialize or "
            "onecopy.load_pretrained."
        )
    return Ema(model, decay)


def _checked(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise SettingsError(f"decay must be between 0 and 1; found {decay}")
    return decay


def _wide(parameter: Tensor) -> Tensor:
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def _set(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
