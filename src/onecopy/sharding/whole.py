"""Whole parameters on request: `gathered` for looking at and editing them, `materialize` for models built on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.dtensors import is_dtensor
from onecopy.errors import UsageError
from onecopy.sharding.bucket import Bucket, Found
from onecopy.sharding.buffers import broadcast_buffers
from onecopy.sharding.engine import Engine, find_engine
from onecopy.sharding.flat import FlatBuffer
from onecopy.sharding.optimizers import mark_replaced, watch
from onecopy.sharding.sliced import SlicedTensor
from onecopy.sharding.unit import Unit


@contextmanager
def gathered(target: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Iterator[Any]:
    """Make parameters whole inside a `with` block; every rank must enter it.

    Inside, the modules hold plain `nn.Parameter`s of full shape in the master dtype: generate, inspect, save, edit.
    Those that tensor parallelism has made DTensors are DTensors again, whose `full_tensor()` is the whole.
    Memory: all of the parameters asked for, on every rank. Traffic: (N-1)/N of them; with ``write`` that much again.

    Args:
        target: a sharded model or a module in it, one of its parameters, or several.
        write: keep what the block changed, as the first rank has it. Without it changes are an error.

    Yields:
        ``target`` if it is a module; the whole parameter or the list of them otherwise.

    Raises:
        UsageError: if ``target`` is not sharded, if the model is computing, or if values changed without ``write``.
    """
    if isinstance(target, nn.Module) and (engine := find_engine(target)) is not None:
        engine.come_to_rest()
    wanted = _parameters_of(target)
    # In the order of the parameters, which is that of all ranks.
    engines = dict.fromkeys(_engine_of(parameter) for parameter in wanted)
    entered: list[Engine] = []
    opened: list[_Opened] = []
    try:
        for engine in engines:
            engine.enter_gathered()
            entered.append(engine)
        for engine in engines:
            for bucket in _buckets_with(engine, wanted):
                opened.append(_Opened(bucket, wanted))  # noqa: PERF401 (those opened before one that fails are closed)
        if isinstance(target, nn.Module):
            yield target
        else:
            whole = {id(s): w for o in opened for s, w in o.shown}
            found = [whole[id(parameter)] for parameter in wanted]
            yield found[0] if isinstance(target, Tensor) else found
    except BaseException:
        for item in opened:
            item.close()
        raise
    else:
        for item in opened:
            item.close()
        for item in opened:
            item.store(write)
    finally:
        for engine in entered:
            engine.gathered -= 1


def materialize(
    model: nn.Module, device: torch.device | str = "cpu", init: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Give a model that was sharded on the meta device memory and values, one unit at a time.

    Modules are initialised in the order of `model.modules()` while their parameters are whole, so the values are those
    that one process would draw. Memory: the slices, and one unit whole beside the root's own parameters.

    Args:
        model: the sharded model, in place.
        device: where slices and buffers go.
        init: called with every module that has parameters or buffers of its own. None calls its `reset_parameters`.

    Raises:
        UsageError: if the model is not sharded on meta, or a module has no `reset_parameters` and ``init`` is None.
    """
    engine = allocate(model, device)
    left: dict[Unit, int] = {}
    units_of: dict[nn.Module, list[Unit]] = {}
    for unit in engine.units:
        for bucket in unit.buckets:
            for module in {module for entry in bucket.entries for module, _ in entry.places}:
                if unit not in units_of.setdefault(module, []):
                    units_of[module].append(unit)
                    left[unit] = left.get(unit, 0) + 1
    opened: dict[Unit, list[_Opened]] = {}
    for module in model.modules():
        for unit in units_of.get(module, []):
            if unit not in opened:
                opened[unit] = [_Opened(bucket, None, gather=False) for bucket in unit.buckets]
        _initialise(module, init)
        for unit in units_of.get(module, []):
            left[unit] -= 1
            if not left[unit]:
                for item in opened.pop(unit):
                    item.close()
                    item.store(write=True)
    broadcast_buffers(model, engine.mesh, all_dtypes=True)
    return model


def allocate(model: nn.Module, device: torch.device | str) -> Engine:
    """Give a model that was sharded on the meta device memory, and no values: slices are zero, buffers undefined.

    Raises:
        UsageError: if the model is not sharded on meta.
    """
    device = torch.device(device)
    engine = _engine_of(_parameters_of(model)[0])
    if not all(bucket.device.type == "meta" for unit in engine.units for bucket in unit.buckets):
        raise UsageError("only models built on the meta device are given memory; this one has its values.")
    for unit in engine.units:
        for bucket in unit.buckets:
            old = [Found(e.name, e.shown, e.places) for e in bucket.entries]
            bucket.place_on(device, old)
            bucket.show_sliced()
            for found in old:
                mark_replaced(found.parameter, found.name)
    engine.rebuild_gradients()
    watch(engine)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    return engine


def _initialise(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    own = any(p is not None for p in module._parameters.values()) or any(
        b is not None for b in module._buffers.values()
    )
    if not own:
        return
    if init is not None:
        init(module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        raise UsageError(
            f"{type(module).__name__} has parameters or buffers and no reset_parameters(): pass "
            f"onecopy.materialize(model, init=callback)."
        )


class _Opened:
    """A bucket that modules see whole, in the master dtype."""

    def __init__(self, bucket: Bucket, wanted: list[SlicedTensor] | None, *, gather: bool = True) -> None:
        self._bucket = bucket
        self._buffer: FlatBuffer = bucket.gather_masters() if gather else bucket.buffer(bucket.dtypes.master)
        self.shown: list[tuple[SlicedTensor, nn.Parameter]] = []
        for position, (entry, view) in enumerate(zip(bucket.entries, self._buffer.views, strict=True)):
            if wanted is not None and not any(entry.sliced is parameter for parameter in wanted):
                continue
            whole = bucket.as_parameter(position, view)
            if bucket.trainable:
                whole.register_post_accumulate_grad_hook(_refuse_gradient)
            self.shown.append((entry.sliced, whole))
            for module, attribute in entry.places:
                module._parameters[attribute] = whole
        self._written = self._writes()

    def _writes(self) -> int:
        """Counts writes. Plain parameters share the count of the buffer's views; each DTensor has its own."""
        return self._buffer.views[0]._version + sum(w._version for _, w in self.shown if is_dtensor(w))

    def close(self) -> None:
        self._bucket.show_sliced()

    def store(self, write: bool) -> None:
        if write:
            self._bucket.load_flat(self._buffer.flat)
        elif self._writes() != self._written or not self._bucket.equals_slice(self._buffer.flat):
            raise UsageError(
                f"parameters of unit {self._bucket.unit!r} were changed inside onecopy.gathered, which would be lost: "
                f"pass write=True to keep the first rank's changes, or edit copies."
            )


def _refuse_gradient(parameter: Tensor) -> None:
    raise UsageError("a backward inside onecopy.gathered would lose its gradients; train outside of it.")


def _parameters_of(target: nn.Module | Tensor | Iterable[Tensor]) -> list[SlicedTensor]:
    if isinstance(target, nn.Module):
        found: list[Any] = list(target.parameters())
    else:
        found = [target] if isinstance(target, Tensor) else list(target)
    for parameter in found:
        if not isinstance(parameter, SlicedTensor):
            raise UsageError(
                "onecopy.gathered takes a model that onecopy.shard has sharded, a module in it, or its parameters; "
                f"found {type(parameter).__name__}. Inside another gathered block parameters are whole already."
            )
    if not found:
        raise UsageError("onecopy.gathered found no parameters")
    return found


def _engine_of(parameter: SlicedTensor) -> Engine:
    engine = parameter._engine() if parameter._engine is not None else None
    if engine is None:
        raise UsageError(f"{parameter.slicing.name!r} does not belong to a sharded model any more")
    assert isinstance(engine, Engine)
    return engine


def _buckets_with(engine: Engine, wanted: list[SlicedTensor]) -> list[Bucket]:
    ids = {id(parameter) for parameter in wanted}
    return [
        bucket for unit in engine.units for bucket in unit.buckets if any(id(e.sliced) in ids for e in bucket.entries)
    ]
