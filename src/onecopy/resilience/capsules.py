"""Capsules: what belongs to no slice, and goes along.

A **capsule** is one rank's own: its random number generators, and its buffers where ranks do not keep them equal. A
neighbour gets it with every step. A **snapshot** is what all ranks have alike and can change from step to step: the
values in the optimizer's groups, which no scheduler's state brings back, the objects that users keep, and buffers.

Private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch.amp.GradScaler._per_optimizer_states`, which loading a scaler's state leaves as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from onecopy.checkpoint.random import pack, put_generators, take_generators, unpack
from onecopy.errors import SettingsError
from onecopy.resilience.slices import group_values
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.tensor.sliced import SlicedTensor


class Belongings:
    """Takes and puts back capsules and snapshots.

    Args:
        kept: objects with `state_dict()` and `load_state_dict()`, or mappings that change in place; all ranks' alike.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, kept: Mapping[str, Any]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._kept = {name: what for name, what in kept.items() if what is not None}
        for name, what in self._kept.items():
            _check(name, what)
        self._buffers: dict[str, tuple[int, Tensor]] = {}

    # --- capsules

    def capsule(self) -> Tensor:
        """This rank's, as uint8."""
        own: dict[str, Any] = {"generators": take_generators()}
        if not self._engine.buffers.are_equal:
            own["buffers"] = {name: buffer.cpu() for name, buffer in self._all_buffers()}
        return pack(own)

    def open_capsule(self, capsule: Tensor) -> None:
        """Go on as the rank whose capsule this is."""
        found = unpack(capsule)
        put_generators(found["generators"])
        self._put_buffers(found.get("buffers", {}))

    # --- snapshots

    def snapshot(self) -> dict[str, Any]:
        """What all ranks have alike, copied."""
        kept = {name: copy.deepcopy(_state_of(what)) for name, what in self._kept.items()}
        return {"groups": group_values(self._optimizer), "kept": kept}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Put back what `snapshot` took, here or on another rank."""
        for group, values in zip(self._optimizer.param_groups, snapshot["groups"], strict=True):
            group.update(copy.deepcopy(values))
        for name, what in self._kept.items():
            state = copy.deepcopy(snapshot["kept"][name])
            if hasattr(what, "load_state_dict"):
                what.load_state_dict(state)
                if isinstance(what, torch.amp.GradScaler):
                    what._per_optimizer_states.clear()
            else:
                what.clear()
                what.update(state)

    def remember_buffers(self) -> dict[str, Tensor]:
        """The model's buffers as they are now; only what was written to since the last call is copied."""
        for name, buffer in self._all_buffers():
            version, _ = self._buffers.get(name, (-1, buffer))
            if version != buffer._version:
                self._buffers[name] = (buffer._version, buffer.detach().clone())
        return {name: values for name, (_, values) in self._buffers.items()}

    def put_back_buffers(self) -> None:
        """Those that `remember_buffers` saw last."""
        self._put_buffers({name: values for name, (_, values) in self._buffers.items()})

    def put_snapshot_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Another rank's, where all have the same."""
        if self._engine.buffers.are_equal:
            self._put_buffers(buffers)

    def _all_buffers(self) -> list[tuple[str, Tensor]]:
        return [
            (name, buffer)
            for name, buffer in self._engine.model.named_buffers()
            if buffer is not None and not buffer.is_meta
        ]

    def _put_buffers(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._all_buffers():
                if name in values:
                    buffer.copy_(values[name])


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether the scaler has unscaled the optimizer's gradients since its last update."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])


@contextmanager
def unscaled_alike(scaler: torch.amp.GradScaler, leader: Optimizer, follower: Optimizer) -> Iterator[None]:
    """Inside the block the scaler holds ``follower`` for unscaled as ``leader`` is now: it steps if that one does."""
    scaler._per_optimizer_states[id(follower)] = dict(scaler._per_optimizer_states[id(leader)])
    try:
        yield
    finally:
        del scaler._per_optimizer_states[id(follower)]


def _state_of(what: Any) -> Any:
    return what.state_dict() if hasattr(what, "state_dict") else dict(what)


def _check(name: str, what: Any) -> None:
    if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")) and not isinstance(what, MutableMapping):
        raise SettingsError(
            f"onecopy.resilient({name}=...) must have state_dict() and load_state_dict(), or be a dict; found "
            f"{type(what).__name__}"
        )
    if any(isinstance(value, SlicedTensor) for value in _leaves(_state_of(what))):
        raise SettingsError(
            f"onecopy.resilient({name}=...) holds slices, which no other rank has (onecopy.ema?): it could not be "
            f"given back to a lost rank. Keep it in checkpoints."
        )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
