"""Slices: all that a rank holds of one place on the shard axis, its own or the one that it mirrors.

That is each bucket's master slice and the optimizer's states of it. Both kinds look the same here, so that a lost
rank's slices go from their mirror into the new rank's own place, and those of its neighbour into its mirror. A
**manifest** tells the receiver what comes: the states there are, their dtypes, and a checksum of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from onecopy.errors import SettingsError
from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.tensor.narrow import gradient_slice
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing

_ROW: Final = 1024
"""64-bit words that a checksum sums before it weighs."""

_SLICED: Final = "sliced"
_VALUE: Final = "value"


@dataclass(frozen=True)
class Manifest:
    """What one rank sends of a place.

    Attributes:
        states: for each parameter of the optimizer, by name, (`_SLICED`, dtype) or (`_VALUE`, what it is).
        checksums: of the tensors that are sent, in their order.
    """

    states: tuple[dict[str, tuple[str, Any]], ...]
    checksums: tuple[int, ...]


class Slices:
    """What a rank holds of one place.

    Args:
        masters: each bucket's slice.
        parameters: those of the optimizer, in the order of its groups, as this place has them.
        optimizer: holds ``parameters``, and their states.
    """

    def __init__(self, masters: Sequence[Tensor], parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.masters = masters
        self.parameters = parameters
        self.optimizer = optimizer

    def tensors(self) -> list[Tensor]:
        """What is sent: masters, then sliced states, as flat tensors that share their memory."""
        return [*self.masters, *(state.local for state in self._sliced_states() if state.local.numel())]

    def describe(self) -> Manifest:
        """The manifest of what is here now."""
        states = []
        for parameter in self.parameters:
            found = self.optimizer.state.get(parameter, {})
            states.append({name: _describe(value) for name, value in found.items()})
        return Manifest(tuple(states), tuple(checksum(tensor) for tensor in self.tensors()))

    def make_room(self, manifest: Manifest) -> list[Tensor]:
        """Let the states be those of ``manifest``. Returns the tensors to be filled, in its order."""
        for parameter, states in zip(self.parameters, manifest.states, strict=True):
            if states or parameter in self.optimizer.state:
                self.optimizer.state[parameter] = {
                    name: _make(kind, what, parameter) for name, (kind, what) in states.items()
                }
        return self.tensors()

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
    return Slices(masters, _parameters(optimizer), optimizer)


class Mirror(Slices):
    """The slices of the next place on the shard axis, which another rank holds too, and the update that follows it.

    The user's own optimizer computes the update: an object of its class, which has all that it has but for parameters,
    states and hooks. So both holders' slices are equal bit for bit.

    Attributes:
        place: whose slices these are.
        gradients: flat, one for each trainable bucket; empty between steps.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, place: int) -> None:
        self.place = place
        self.gradients: list[Tensor] = []
        self._engine = engine
        self._leader = optimizer
        self._trainable = [bucket for bucket in engine.buckets if bucket.trainable]
        masters: list[Tensor] = []
        made: dict[int, nn.Parameter] = {}
        self._by_bucket: list[list[nn.Parameter]] = []
        for bucket in engine.buckets:
            master = torch.zeros(bucket.layout.lengths[place], dtype=bucket.dtypes.master, device=bucket.device)
            masters.append(master)
            mirrored = _mirror_parameters(bucket, master, place)
            if bucket.trainable:
                self._by_bucket.append(mirrored)
            for entry, parameter in zip(bucket.entries, mirrored, strict=True):
                made[id(entry.sliced)] = parameter
        twin = _twin_of(optimizer)
        for own, group in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group["params"] = [made[id(parameter)] for parameter in own["params"]]
        super().__init__(masters, _parameters(twin), twin)
        engine.meter.add("mirror", sum(master.nbytes for master in masters))

    def make_gradients(self, present: Sequence[Sequence[torch.dtype | None]]) -> list[Tensor]:
        """Room for gradients that come.

        Args:
            present: for each trainable bucket, the dtype of each parameter's gradient; None where there is none.

        Returns:
            Flat tensors, one for each bucket that has any.
        """
        self.forget_gradients()
        for bucket, parameters, dtypes in zip(self._trainable, self._by_bucket, present, strict=True):
            if (dtype := next((d for d in dtypes if d is not None), None)) is None:
                continue
            flat = torch.empty(bucket.layout.lengths[self.place], dtype=dtype, device=bucket.device)
            self.gradients.append(flat)
            segments = bucket.layout.segments(self.place)
            for parameter, segment, has in zip(parameters, segments, dtypes, strict=True):
                if has is not None:
                    local = flat[segment.slice_start : segment.slice_start + segment.numel]
                    sliced: Any = parameter
                    parameter.grad = gradient_slice(local, sliced.slicing, bucket.dtypes.master)
        self._engine.meter.set("mirror", self._bytes())
        return self.gradients

    def forget_gradients(self) -> None:
        """Let go of them."""
        self.gradients = []
        for parameter in self.parameters:
            parameter.grad = None

    def follow(self, values: Sequence[dict[str, Any]], step: Callable[[Optimizer], object]) -> None:
        """Update as the slices' owner does.

        Args:
            values: what the owner's groups held before its step.
            step: what was done with the owner's optimizer.
        """
        for group, own in zip(self.optimizer.param_groups, values, strict=True):
            group.update(own)
        step(self.optimizer)
        self.forget_gradients()
        self._engine.meter.set("mirror", self._bytes())

    def _bytes(self) -> int:
        return sum(t.nbytes for t in (*self.masters, *self.gradients)) + self.state_bytes


def own_gradients(engine: Engine) -> tuple[list[list[torch.dtype | None]], Callable[[], list[Tensor]]]:
    """What this rank's neighbour is to be sent of its gradients: dtypes as `Mirror.make_gradients` wants them, and the
    flat tensors, made when asked for.
    """
    trainable = [bucket for bucket in engine.buckets if bucket.trainable]
    present: list[list[torch.dtype | None]] = []
    for bucket in trainable:
        found = [entry.sliced.grad for entry in bucket.entries]
        present.append([gradient.local.dtype if isinstance(gradient, SlicedTensor) else None for gradient in found])

    def flats() -> list[Tensor]:
        return [
            _flat_gradient(bucket, next(d for d in dtypes if d is not None))
            for bucket, dtypes in zip(trainable, present, strict=True)
            if any(d is not None for d in dtypes)
        ]

    return present, flats


def _flat_gradient(bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """The gradients of a bucket's slice end to end: their own memory where they lie so, else a copy."""
    placed = [
        (segment.slice_start, entry.sliced.grad.local)
        for entry, segment in zip(bucket.entries, bucket.segments, strict=True)
        if isinstance(entry.sliced.grad, SlicedTensor) and segment.numel
    ]
    numel = bucket.slice_numel
    if placed:
        start, first = placed[0]
        base, offset = first.untyped_storage().data_ptr(), first.storage_offset() - start
        alike = all(
            local.untyped_storage().data_ptr() == base
            and local.storage_offset() == offset + at
            and local.dtype == dtype
            for at, local in placed
        )
        if alike and offset >= 0 and first.untyped_storage().nbytes() >= (offset + numel) * first.itemsize:
            return first.as_strided((numel,), (1,), offset)
    flat = torch.zeros(numel, dtype=dtype, device=bucket.device)
    for at, local in placed:
        flat[at : at + local.numel()].copy_(local)
    return flat


def _mirror_parameters(bucket: Bucket, master: Tensor, place: int) -> list[nn.Parameter]:
    made = []
    for entry, segment in zip(bucket.entries, bucket.layout.segments(place), strict=True):
        own = entry.sliced.slicing
        slicing = Slicing(own.name, own.shape, own.strides, segment.parameter_start, segment.numel, own.axis)
        local = master[segment.slice_start : segment.slice_start + segment.numel]
        made.append(nn.Parameter(SlicedTensor(local, slicing), bucket.trainable))
    return made


_OWN: Final = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that its twin does not take over: a scheduler's wrapper, and users' hooks."""


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer that steps as ``optimizer`` does, with no parameters and states."""
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in _OWN})
    for name in _OWN[1:]:
        if hasattr(optimizer, name):
            setattr(twin, name, type(getattr(optimizer, name))())
    twin.state = type(optimizer.state)(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return twin


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups hold apart from parameters; tensors copied, for a step may change them in place."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer(engine: Engine, optimizer: Optimizer) -> None:
    """Raise `SettingsError` if the optimizer holds what no other rank does."""
    known = {id(entry.sliced) for bucket in engine.buckets for entry in bucket.entries}
    for parameter in _parameters(optimizer):
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
