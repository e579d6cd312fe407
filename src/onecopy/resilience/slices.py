"""Slices: all that a rank holds of one place on the shard axis, its own or the one that it mirrors.

That is each bucket's master slice and the optimizer's states of it. Both kinds look the same here, so that a lost
rank's slices go from their mirror into the new rank's own place, and those of its neighbour into its mirror. A
**manifest** tells the receiver what comes: the states there are, their dtypes, and a checksum of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.errors import SettingsError
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.tensor.sliced import SlicedTensor

_ROW: Final = 1024
"""64-bit words that a checksum sums before it weighs."""

_SLICED: Final = "sliced"
_VALUE: Final = "value"


States = tuple[dict[str, tuple[str, Any]], ...]
"""For each parameter of an optimizer, its states by name: (`_SLICED`, dtype) or (`_VALUE`, what it is)."""


@dataclass(frozen=True)
class Manifest:
    """What one rank sends of a place.

    Attributes:
        states: of the optimizer.
        checksums: of the tensors that are sent, in their order.
    """

    states: States
    checksums: tuple[int, ...]


class Slices:
    """What a rank holds of one place.

    Args:
        masters: each bucket's slice.
        by_bucket: each bucket's parameters, as this place has them.
        optimizer: holds parameters, and their states.
    """

    def __init__(
        self, masters: Sequence[Tensor], by_bucket: Sequence[Sequence[SlicedTensor]], optimizer: Optimizer
    ) -> None:
        self.masters = masters
        self.by_bucket = by_bucket
        self.parameters = parameters_of(optimizer)
        self.optimizer = optimizer

    def tensors(self) -> list[Tensor]:
        """What is sent: masters, then sliced states, as flat tensors that share their memory."""
        return [*self.masters, *(state.local for state in self._sliced_states() if state.local.numel())]

    def describe(self) -> Manifest:
        """The manifest of what is here now."""
        return Manifest(self.describe_states(), tuple(checksum(tensor) for tensor in self.tensors()))

    def describe_states(self) -> States:
        """Which states there are."""
        found = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return tuple({name: _describe(value) for name, value in states.items()} for states in found)

    def make_room(self, described: States) -> list[Tensor]:
        """Let the states be those that were described. Returns the tensors to be filled, in their order."""
        for parameter, states in zip(self.parameters, described, strict=True):
            if states or parameter in self.optimizer.state:
                self.optimizer.state[parameter] = {
                    name: _make(kind, what, parameter) for name, (kind, what) in states.items()
                }
        return self.tensors()

    def parts(self, bucket: int, parameter: int) -> list[Tensor]:
        """What is here of one parameter, 1-D and equally long: of its master, and of each state by its name."""
        sliced = self.by_bucket[bucket][parameter]
        states = sorted(self.optimizer.state.get(sliced, {}).items())
        return [sliced.local, *(state.local for _, state in states if isinstance(state, SlicedTensor))]

    def _sliced_states(self) -> Iterator[SlicedTensor]:
        for parameter in self.parameters:
            for value in self.optimizer.state.get(parameter, {}).values():
                if isinstance(value, SlicedTensor):
                    yield value

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's sliced states."""
        return sum(state.held_bytes for state in self._sliced_states())


def _describe(value: Any) -> tuple[str, Any]:
    if isinstance(value, SlicedTensor):
        return _SLICED, value.local.dtype
    # Counters, as a rule; the receiver gets a copy.
    return _VALUE, value.detach().cpu() if isinstance(value, Tensor) else value


def _make(kind: str, what: Any, parameter: Tensor) -> Any:
    if kind == _VALUE:
        return what
    assert isinstance(parameter, SlicedTensor)
    return SlicedTensor(torch.empty_like(parameter.local, dtype=what), parameter.slicing)


def own_slices(engine: Engine, optimizer: Optimizer) -> Slices:
    """This rank's own."""
    masters = []
    for bucket in engine.buckets:
        assert bucket.masters.in_memory is not None
        masters.append(bucket.masters.in_memory)
    return Slices(masters, [[entry.sliced for entry in bucket.entries] for bucket in engine.buckets], optimizer)


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups hold apart from parameters; tensors copied, for a step may change them in place."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Its parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer(engine: Engine, optimizer: Optimizer) -> None:
    """Raise `SettingsError` if the optimizer holds what no other rank does."""
    known = {id(entry.sliced) for bucket in engine.buckets for entry in bucket.entries}
    for parameter in parameters_of(optimizer):
        if id(parameter) not in known:
            raise SettingsError(
                f"onecopy.resilient: the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not a "
                f"slice of the sharded model (ignored=, or of another model). No other rank holds it, so a lost rank "
                f"could not get it back: shard it too, or train it apart."
            )


def checksum(tensor: Tensor) -> int:
    """Of a contiguous tensor's bytes, where they lie: sums of its 64-bit words, each weighed by where its row is."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    rows = words.numel() // _ROW
    total = 0
    if rows:
        sums = words[: rows * _ROW].view(rows, _ROW).sum(1)
        total = int((sums * torch.arange(1, rows + 1, device=sums.device)).sum())
    rest = words[rows * _ROW :]
    total += int((rest * torch.arange(1, rest.numel() + 1, device=rest.device)).sum())
    tail = raw[words.numel() * 8 :].to(torch.int64)
    return total + int((tail * torch.arange(1, tail.numel() + 1, device=tail.device)).sum()) * 31
