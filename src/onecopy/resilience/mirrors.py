"""Mirrors: slices of a place that is another rank's, and the update that follows that rank's.

A **twin** holds slices of any place with an optimizer of their own; a mirror is one that is kept up to date. Its
gradients come from their owner, as one flat tensor for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from onecopy.resilience.slices import Slices
from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.bucket.layout import Layout
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.tensor.narrow import gradient_slice
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


class Twin(Slices):
    """Slices of any place, with an optimizer of their own that steps as the user's does.

    It is an object of the same class, which has all that that one has but for parameters, states and hooks.

    Args:
        place: whose slices these are, on the shard axis.
        layouts: how each bucket's elements lie; None: as the buckets have them.
    """

    def __init__(
        self, engine: Engine, optimizer: Optimizer, place: int, layouts: Sequence[Layout] | None = None
    ) -> None:
        self.place = place
        self._engine = engine
        masters: list[Tensor] = []
        made: dict[int, SlicedTensor] = {}
        by_bucket: list[list[SlicedTensor]] = []
        for bucket, layout in zip(engine.buckets, layouts or [b.layout for b in engine.buckets], strict=True):
            master = torch.zeros(layout.lengths[place], dtype=bucket.dtypes.master, device=bucket.device)
            masters.append(master)
            parameters = _twin_parameters(bucket, layout, master, place)
            by_bucket.append(parameters)
            for entry, parameter in zip(bucket.entries, parameters, strict=True):
                made[id(entry.sliced)] = parameter
        twin = _twin_of(optimizer)
        for own, group in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group["params"] = [made[id(parameter)] for parameter in own["params"]]
        super().__init__(masters, by_bucket, twin)

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is here."""
        return sum(master.nbytes for master in self.masters) + self.state_bytes


class Mirror(Twin):
    """The slices of the next place on the shard axis, which another rank holds too, and the update that follows it.

    The user's own optimizer computes the update, so both holders' slices are equal bit for bit.

    Attributes:
        gradients: flat, one for each trainable bucket; empty between steps.
    """

    def __init__(
        self, engine: Engine, optimizer: Optimizer, place: int, layouts: Sequence[Layout] | None = None
    ) -> None:
        super().__init__(engine, optimizer, place, layouts)
        self.gradients: list[Tensor] = []

    def count(self) -> None:
        """Let the meter count what is here, and no other mirror."""
        self._engine.meter.set("mirror", self.held_bytes + sum(gradient.nbytes for gradient in self.gradients))

    def make_gradients(self, present: Sequence[Sequence[torch.dtype | None]]) -> list[Tensor]:
        """Room for gradients that come.

        Args:
            present: for each trainable bucket, the dtype of each parameter's gradient; None where there is none.

        Returns:
            Flat tensors, one for each bucket that has any.
        """
        self.forget_gradients()
        trainable = [both for both in zip(self._engine.buckets, self.by_bucket, strict=True) if both[0].trainable]
        for (bucket, parameters), dtypes in zip(trainable, present, strict=True):
            if (dtype := next((d for d in dtypes if d is not None), None)) is None:
                continue
            flat = torch.empty(bucket.layout.lengths[self.place], dtype=dtype, device=bucket.device)
            self.gradients.append(flat)
            segments = bucket.layout.segments(self.place)
            for parameter, segment, has in zip(parameters, segments, dtypes, strict=True):
                if has is not None:
                    local = flat[segment.slice_start : segment.slice_start + segment.numel]
                    parameter.grad = gradient_slice(local, parameter.slicing, bucket.dtypes.master)
        self.count()
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
        self.count()


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


def _twin_parameters(bucket: Bucket, layout: Layout, master: Tensor, place: int) -> list[SlicedTensor]:
    made: list[SlicedTensor] = []
    for entry, segment in zip(bucket.entries, layout.segments(place), strict=True):
        own = entry.sliced.slicing
        slicing = Slicing(own.name, own.shape, own.strides, segment.parameter_start, segment.numel, own.axis)
        local = master[segment.slice_start : segment.slice_start + segment.numel]
        parameter: Tensor = nn.Parameter(SlicedTensor(local, slicing), bucket.trainable)
        assert isinstance(parameter, SlicedTensor)
        made.append(parameter)
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
