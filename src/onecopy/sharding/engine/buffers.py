"""Buffers (running statistics, codebooks) are not sharded; this file keeps them equal to the first rank's, as DDP does.

    before a forward for training        what users' code has done to them since the last step is made equal
    before the optimizer's step          what the forwards have done; so between steps they are equal on all ranks

Hence evaluation and `state_dict()` need no message. A forward for evaluation sends one only where forwards for training
came and no step since, and none inside `torch.no_grad()` of a model in training mode. `save` and `gathered` always do.

Most buffers never change (rotary tables, masks). So what is sent each time is what is small and persistent, and what
was found to differ between ranks; the others are compared from time to time.

One private torch name is used here, read in torch 2.13: `nn.Module._non_persistent_buffers_set`.
tests/house/test_private_apis.py fails clearly when it moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from onecopy.comm.dtensors import is_dtensor, local_of
from onecopy.comm.mesh import Axis, Mesh
from onecopy.errors import MismatchError

_TAG: Final = 15
_HEADER: Final = 16
"""Bytes before the values, which say what follows; a multiple of every dtype's size."""

_SMALL: Final = 2**16
"""Bytes of a buffer that is sent each time without being asked whether it ever differs."""

_COMPARED_EVERY: Final = 256
"""Exchanges between two comparisons of all buffers, at most; the first ones come at 1, 2, 4, 8, ..."""


@dataclass(frozen=True)
class _Buffer:
    """A buffer as it is now: ``tensor`` has each of its elements in memory once, and writing to it moves no version."""

    name: str
    tensor: Tensor
    persistent: bool
    plain: bool

    @property
    def description(self) -> str:
        return f"{self.name!r} of shape {tuple(self.tensor.shape)}, {self.tensor.dtype}"


_Place = tuple[str, nn.Module, str]
"""A buffer's name, the module that holds it, and as which attribute."""


class Buffers:
    """Keeps a model's buffers equal to those of the mesh's first rank.

    Args:
        model: the sharded model.
        mesh: its ranks.
        syncs: False leaves each rank its own.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, syncs: bool) -> None:
        self._model = model
        self._mesh = mesh
        # As DDP, which keeps to the buffers that are there when it is made. All ranks have the same ones then.
        self._syncs = syncs and mesh.size > 1 and bool(_places(model))
        self._exchanges = 0
        self._differing: set[str] = set()
        self._sent: list[_Place] = []
        self._due = True
        self._trained = False
        self._stale = False

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have the same ones between steps."""
        return self._syncs or self._mesh.size == 1

    def begin_anew(self) -> None:
        """Ranks have met anew, some of which know nothing of earlier exchanges: compare all again."""
        self._exchanges = 0
        self._sent = []
        self._due, self._trained, self._stale = True, False, False

    def before_forward(self, *, recorded: bool) -> None:
        """The model's forward begins, on every rank.

        Args:
            recorded: autograd records it.
        """
        if not self._syncs:
            return
        if (recorded and self._due) or (self._stale and not recorded and not self._model.training):
            self._exchange()
        if recorded:
            # Not again before a backward: one rank's forward may raise an error and be tried again.
            self._due = False
        self._trained = self._trained or recorded
        self._stale = self._stale or recorded or self._model.training

    def micro_batch_ended(self, *, last: bool) -> None:
        """A backward is over. Only the last one of a step is followed by an exchange, as under DDP's no_sync."""
        self._due = last

    def before_step(self) -> None:
        """The optimizer is about to step, on every rank."""
        if self._trained:
            self.make_equal()

    def make_equal(self) -> None:
        """Make buffers equal, whatever was done to them; every rank calls it."""
        if self._syncs:
            self._exchange()

    def _exchange(self) -> None:
        self._trained = self._stale = False
        self._exchanges += 1
        number = self._exchanges
        if number & (number - 1) == 0 or number % _COMPARED_EVERY == 0:
            self._compare()
        elif self._sent:
            _send([found for place in self._sent if (found := _look(*place)) is not None], self._mesh.axes)

    def _compare(self) -> None:
        """Send all buffers, and learn which differ between ranks."""
        places = _places(self._model)
        found = [buffer for place in places if (buffer := _look(*place)) is not None]
        common = _agree(found, self._mesh)
        if common is not None:
            found = [buffer for buffer in found if buffer.name in common]
        differing = _send(found, self._mesh.axes, compare=True)
        flags = torch.tensor([b.name in differing for b in found], dtype=torch.uint8, device=self._mesh.control_device)
        for axis in self._mesh.axes if found else ():
            if message := axis.combine(flags, "agree", maximum=True):
                message.finish()
        self._differing |= {b.name for b, differs in zip(found, flags.tolist(), strict=True) if differs}
        sent = {b.name for b in found if b.name in self._differing or (b.persistent and b.tensor.nbytes <= _SMALL)}
        self._sent = [place for place in places if place[0] in sent]


def equalise(model: nn.Module, mesh: Mesh) -> None:
    """Set the model's buffers to those of the mesh's first rank, plain ones over the tensor axis too."""
    found = _find(model)
    _send([buffer for buffer in found if buffer.plain], (*mesh.axes, mesh.tensor))
    _send([buffer for buffer in found if not buffer.plain], mesh.axes)


def _find(model: nn.Module) -> list[_Buffer]:
    """The buffers that have values, each once."""
    return [found for place in _places(model) if (found := _look(*place)) is not None]


def _places(model: nn.Module) -> list[_Place]:
    """Where the model holds buffers, each once."""
    found: dict[int, _Place] = {}
    for path, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), (f"{path}.{attribute}" if path else attribute, module, attribute))
    return list(found.values())


def _look(name: str, module: nn.Module, attribute: str) -> _Buffer | None:
    """The buffer that is at a place now, if it has values."""
    buffer = module._buffers.get(attribute)
    if buffer is None or buffer.is_meta or buffer.layout is not torch.strided or not buffer.numel():
        return None
    local = local_of(buffer).data
    for dimension, stride in enumerate(local.stride()):
        if stride == 0:
            local = local.narrow(dimension, 0, min(1, local.shape[dimension]))
    persistent = attribute not in module._non_persistent_buffers_set
    return _Buffer(name, local, persistent, not is_dtensor(buffer))


def _send(buffers: Iterable[_Buffer], axes: Iterable[Axis], *, compare: bool = False) -> set[str]:
    """Take the first rank's values along ``axes``: one message for each device.

    Returns:
        Names of those whose values changed; empty without ``compare``.
    """
    axes = [axis for axis in axes if axis.size > 1]
    groups: dict[torch.device, list[_Buffer]] = {}
    for buffer in buffers:
        groups.setdefault(buffer.tensor.device, []).append(buffer)
    changed: set[str] = set()
    if not axes:
        return changed
    for device, group in groups.items():
        # The widest first: then each one's bytes begin where its dtype may.
        group.sort(key=lambda buffer: -buffer.tensor.itemsize)
        # On a device the comparison would wait for the message, and native calls take no other length anyway.
        checks = compare or device.type == "cpu"
        if checks:
            header = torch.frombuffer(bytearray(_digest(group)), dtype=torch.uint8).to(device)
        else:
            header = torch.zeros(_HEADER, dtype=torch.uint8, device=device)
        own = torch.cat([header, *(_bytes_of(buffer.tensor) for buffer in group)])
        flat = own.clone()
        for axis in axes:
            axis.broadcast(flat, "", _TAG)
        if all(axis.rank == 0 for axis in axes):
            continue
        if checks and not torch.equal(flat[:_HEADER], own[:_HEADER]):
            raise MismatchError(
                f"buffers have other shapes or dtypes on this rank than on rank {axes[0].ranks[0]}. On this rank "
                f"they are {', '.join(sorted(b.description for b in group))}. Give them the same shapes and dtypes "
                "on every rank, or call onecopy.shard(broadcast_buffers=False), which leaves each rank its own "
                "buffers."
            )
        start = _HEADER
        for buffer in group:
            stop = start + buffer.tensor.nbytes
            if not compare or not torch.equal(flat[start:stop], own[start:stop]):
                buffer.tensor.copy_(flat[start:stop].view(buffer.tensor.dtype).view(buffer.tensor.shape))
                changed.add(buffer.name)
            start = stop
    return changed if compare else set()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _digest(buffers: Iterable[_Buffer]) -> bytes:
    return hashlib.sha256("\n".join(buffer.description for buffer in buffers).encode()).digest()[:_HEADER]


def _agree(buffers: list[_Buffer], mesh: Mesh) -> set[str] | None:
    """Names of the buffers that have the same shape and dtype on all ranks; None if all have."""
    own = float(int.from_bytes(_digest(buffers)[:6], "big"))
    differs = torch.zeros(1, dtype=torch.uint8, device=mesh.control_device)
    for axis in mesh.axes:
        # Two maxima tell whether all are equal: the largest, and the largest of the negated.
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=axis.control_device)
        if message := axis.combine(extremes, "agree", maximum=True):
            message.finish()
            differs |= int(extremes[0] != -extremes[1])
    for axis in mesh.axes:
        if message := axis.combine(differs, "agree", maximum=True):
            message.finish()
    if not differs:
        return None
    common = {buffer.description: buffer.name for buffer in buffers}
    for axis in mesh.axes:
        everyones = axis.exchange_objects(list(common))
        common = {line: name for line, name in common.items() if all(line in others for others in everyones)}
    return set(common.values())
