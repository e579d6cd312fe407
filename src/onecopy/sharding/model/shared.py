"""Shared memory: parameters of a model that lie over one another, though they are several objects.

Where two show the very same elements (`head.weight.data = embed.weight.data`), they are one tied parameter, as if both
modules held the same object. Everything else would come apart when each is sharded for itself, and is refused.

One private torch name is used here, read in torch 2.13: `UntypedStorage._cdata`, which tells storages apart that have
no memory (meta). tests/house/test_private_apis.py fails clearly when it moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecopy.comm.dtensors import local_of
from onecopy.errors import SettingsError


@dataclass(frozen=True)
class _Span:
    """Bytes ``start`` to ``stop`` of one memory, in which all elements of ``tensor`` lie, maybe with gaps."""

    memory: tuple[str, int]
    start: int
    stop: int
    name: str
    tensor: Tensor


def find_twins(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> dict[int, nn.Parameter]:
    """The first parameter over the same elements, by the id of each later one.

    Args:
        parameters: by name, each object once, in the model's order; so are ``buffers``.

    Raises:
        SettingsError: if a parameter shares only some elements with another or with a buffer, or shows them otherwise.
    """
    order = {name: position for position, name in enumerate([*parameters, *buffers])}
    found = [_span(name, tensor) for name, tensor in {**parameters, **buffers}.items() if tensor.numel()]
    spans = [span for span in found if span is not None]
    spans.sort(key=lambda span: (span.memory, span.start, order[span.name]))
    twins: dict[int, nn.Parameter] = {}
    reaching: list[_Span] = []
    for span in spans:
        reaching = [other for other in reaching if other.memory == span.memory and other.stop > span.start]
        for other in reaching:
            first, later = sorted((other, span), key=lambda s: order[s.name])
            if first.name in parameters and _overlap(first, later):
                one, two = first.tensor, later.tensor
                if later.name in buffers or first.start != later.start or not _are_same(one, two):
                    raise SettingsError(_refusal(first, later, later.name in buffers))
                tied = parameters[first.name]
                twins[id(parameters[later.name])] = twins.get(id(tied), tied)
        reaching.append(span)
    return twins


def _span(name: str, tensor: Tensor) -> _Span | None:
    """None for a tensor that is made of others (a quantised one), and has no memory of its own."""
    local = local_of(tensor)
    storage = local.untyped_storage()
    size = local.itemsize
    length = int(size * (1 + sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))))
    # Without memory there are no addresses (meta, fake tensors), and each storage is a memory of its own.
    if storage.device.type == "meta":
        start = int(local.storage_offset()) * size
        return _Span(("meta", storage._cdata), start, start + length, name, local)
    try:
        start = local.data_ptr()
    except RuntimeError:
        return None
    if start == 0:
        return None
    return _Span((str(local.device), 0), start, start + length, name, local)


def _are_same(first: Tensor, later: Tensor) -> bool:
    return (first.shape, first.stride(), first.dtype, first.requires_grad) == (
        later.shape,
        later.stride(),
        later.dtype,
        later.requires_grad,
    )


def _overlap(first: _Span, later: _Span) -> bool:
    """Whether some byte belongs to both; views with gaps may lie between each other's elements."""
    if first.tensor.is_contiguous() and later.tensor.is_contiguous():
        return True
    start = min(first.start, later.start)
    size = first.tensor.itemsize
    if size != later.tensor.itemsize or (later.start - first.start) % size:
        return True
    region = torch.zeros((max(first.stop, later.stop) - start) // size, dtype=torch.bool)
    own, other = (
        region.as_strided(span.tensor.shape, span.tensor.stride(), (span.start - start) // size)
        for span in (first, later)
    )
    own.fill_(True)
    return bool(other.any())


def _refusal(first: _Span, later: _Span, buffer: bool) -> str:
    what = f"{'buffer' if buffer else 'parameter'} {later.name!r} lies over memory of parameter {first.name!r}"
    if buffer:
        return f"{what} and would not follow it once that is sharded: register a copy, .clone()."
    return (
        f"{what}, but does not show the very same elements in the same way; sharded, they would come apart. Make them "
        f"one parameter and use parts or views of it in forward, or give one of them a copy, .clone()."
    )
