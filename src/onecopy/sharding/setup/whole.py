"""Whole parameters on request: `gathered` for looking at and editing them, `materialize` for models built on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.dtensors import is_dtensor, local_of
from onecopy.errors import UsageError
from onecopy.sharding.bucket.bucket import NO_MEMORY, Bucket, FoundParameter
from onecopy.sharding.bucket.flat import FlatBuffer
from onecopy.sharding.engine.buffers import equalise
from onecopy.sharding.engine.engine import Engine, find_engine
from onecopy.sharding.engine.unit import Unit
from onecopy.sharding.model.ignored import is_ignored, mark_ignored
from onecopy.sharding.setup.computing import Computing, Copies
from onecopy.sharding.setup.optimizers import mark_replaced, watch
from onecopy.sharding.tensor.recorded import mesh_of
from onecopy.sharding.tensor.single import gather_slices, spread_from
from onecopy.sharding.tensor.sliced import SlicedTensor


@contextmanager
def gathered(
    target: nn.Module | Tensor | Iterable[Tensor], write: bool = False, source: int | None = None
) -> Iterator[Any]:
    """Make parameters, gradients or optimizer states whole inside a `with` block; every rank must enter it.

    Inside, the modules hold plain `nn.Parameter`s of full shape in the master dtype, so that you can generate, inspect,
    save and edit. Parameters that tensor parallelism has made DTensors are DTensors again; their `full_tensor()` is
    the whole.
    A module that is called computes as in training. Under ``precision=`` it uses copies in the compute dtype, made at
    the first call, and its floating-point inputs are cast.
    Memory: all parameters of ``target``, on every rank, and those copies. Traffic: (N-1)/N of the parameters; with
    ``write`` as much again.

    Args:
        target: a sharded model or a module in it; one of its parameters, or any other SlicedTensor (a gradient, a
            state of the optimizer), which comes as a plain tensor of full shape; or several of them.
        write: keep the changes that the block made on the rank ``source``. Without ``write``, changes are an error.
        source: a global rank. It sends its values to every rank, and each rank keeps its slice. None: the first rank.

    Yields:
        ``target`` if it is a module; the whole tensor or the list of them otherwise.

    Raises:
        UsageError: if ``target`` is not sharded, if the model is computing, if a gradient has not been reduced yet, if
            values changed without ``write``, or if ``source`` is none of the model's ranks.
    """
    if isinstance(target, nn.Module) and (engine := find_engine(target)) is not None:
        engine.come_to_rest()
        _check_has_memory(engine)
    given = _slices_of(target)
    wanted = [tensor for tensor in given if tensor._engine is not None]
    # In the order of the parameters, which is that of all ranks.
    engines = dict.fromkeys(_engine_of(parameter) for parameter in wanted)
    entered: list[Engine] = []
    opened: list[_Opened | _OpenedSlice] = []
    computing: list[Computing] = []
    try:
        for engine in engines:
            _check_has_memory(engine)
            engine.enter_gathered()
            entered.append(engine)
        for engine in engines:
            own: list[_Opened] = []
            for bucket in _buckets_with(engine, wanted):
                own.append(_Opened(bucket, wanted))
                opened.append(own[-1])
            if engine.inputs is not None:
                copies = [item.copies() for item in own if item.computes_in_another_dtype]
                scopes = [unit.scope for unit in engine.units]
                computing.append(Computing(engine.model, scopes, engine.inputs, copies, write))
        opened += [_OpenedSlice(tensor) for tensor in given if tensor._engine is None]
        known = {id(parameter) for engine in engines for parameter in engine.model.parameters()}
        if isinstance(target, nn.Module):
            yield target
        else:
            whole = {id(s): w for o in opened for s, w in o.shown}
            found = [whole[id(tensor)] for tensor in given]
            yield found[0] if isinstance(target, Tensor) else found
    except BaseException:
        for item in opened:
            item.close()
        raise
    else:
        strangers = _find_strangers(engines, known)
        strangers += [name for item in opened if isinstance(item, _Opened) for name in item.resized()]
        for item in opened:
            item.close()
        if strangers:
            raise UsageError(
                f"parameters were added, replaced or resized inside onecopy.gathered, {strangers[0]!r} among them. "
                "They would be neither trained nor saved: resize embeddings (model.resize_token_embeddings), and "
                "add and replace modules, before onecopy.shard."
            )
        for item in opened:
            item.store(write, source)
    finally:
        for each in computing:
            each.close()
        for engine in entered:
            engine.gathered -= 1


def materialize(
    model: nn.Module, device: torch.device | str = "cpu", init: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Give a model that was sharded on the meta device memory and values, one unit at a time.

    Modules are initialised in the order of `model.modules()` while their parameters are whole, so they get the values
    that one process would draw. Memory: the slices, one whole unit, and the root's own parameters.

    Args:
        model: the sharded model, in place.
        device: where slices and buffers go.
        init: called with every module that has parameters or buffers of its own. None calls its `reset_parameters`.

    Returns:
        ``model``.

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
    engine.versions.lay_out()
    equalise(model, engine.mesh)
    return model


def allocate(model: nn.Module, device: torch.device | str) -> Engine:
    """Give a model that was sharded on the meta device memory, and no values: slices are zero, buffers undefined.

    Raises:
        UsageError: if the model is not sharded on meta.
    """
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        # Buffers and pools are kept by device, and tensors say which they are on.
        device = torch.device(device.type, torch.accelerator.current_device_index())
    engine = _engine_of(_slices_of(model)[0])
    if not all(bucket.device.type == "meta" for unit in engine.units for bucket in unit.buckets):
        raise UsageError(
            "onecopy.materialize gives memory to models that were built on the meta device, but this model has its "
            "values already: leave the call out."
        )
    for unit in engine.units:
        for bucket in unit.buckets:
            old = [FoundParameter(e.name, e.shown, e.places) for e in bucket.entries]
            bucket.place_on(device, old)
            bucket.show_sliced()
            for found in old:
                mark_replaced(found.parameter, found.name)
    engine.rebuild_gradients()
    watch(engine)
    ignored = {
        id(p): nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        for p in model.parameters()
        if is_ignored(p)
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in ignored:
                module._parameters[name] = ignored[id(parameter)]
                mark_ignored(ignored[id(parameter)])
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
            f"{type(module).__name__} has parameters or buffers of its own but no reset_parameters() to initialise "
            "them: pass onecopy.materialize(model, init=callback)."
        )


def _find_strangers(engines: Iterable[Engine], known: set[int]) -> list[str]:
    """Names of parameters that modules hold and did not hold when a gathered block began."""
    return [
        name for engine in engines for name, parameter in engine.model.named_parameters() if id(parameter) not in known
    ]


class _Opened:
    """A bucket that modules see whole, in the master dtype."""

    def __init__(self, bucket: Bucket, wanted: list[SlicedTensor] | None, *, gather: bool = True) -> None:
        self._bucket = bucket
        bucket.is_opened = True
        self._buffer: FlatBuffer = bucket.gather_masters() if gather else bucket.buffer(bucket.dtypes.master)
        self.shown: list[tuple[SlicedTensor, nn.Parameter]] = []
        self._views: list[Tensor] = []
        for position, (entry, view) in enumerate(zip(bucket.entries, self._buffer.views, strict=True)):
            if wanted is not None and not any(entry.sliced is parameter for parameter in wanted):
                continue
            whole = bucket.as_parameter(position, view)
            if bucket.trainable:
                whole.register_post_accumulate_grad_hook(_refuse_gradient)
            self.shown.append((entry.sliced, whole))
            self._views.append(view)
            entry.put(whole)
        self._written = self._writes()

    @property
    def computes_in_another_dtype(self) -> bool:
        return self._bucket.dtypes.compute != self._bucket.dtypes.master

    def copies(self) -> Copies:
        """The same parameters for computing with."""
        entries = {id(entry.sliced): entry for entry in self._bucket.entries}
        shown = [(entries[id(sliced)], whole) for sliced, whole in self.shown]
        return Copies(self._bucket, self._buffer, shown, _refuse_gradient)

    def _writes(self) -> int:
        """Counts writes. Plain parameters share the count of the buffer's views; each DTensor has its own."""
        return self._buffer.views[0]._version + sum(w._version for _, w in self.shown if is_dtensor(w))

    def close(self) -> None:
        self._bucket.show_sliced()
        self._bucket.is_opened = False

    def resized(self) -> list[str]:
        """Names of parameters whose `.data` became one of another shape or dtype."""
        return [
            sliced.slicing.name
            for (sliced, whole), view in zip(self.shown, self._views, strict=True)
            if (local_of(whole).shape, whole.dtype) != (view.shape, view.dtype)
        ]

    def _take_assigned(self) -> bool:
        """Copy in what was assigned to `.data` of parameters, which looks at other memory. Returns whether any was."""
        found = False
        with torch.no_grad():
            for (_, whole), view in zip(self.shown, self._views, strict=True):
                if (local := local_of(whole)).data_ptr() != view.data_ptr():
                    view.copy_(local)
                    found = True
        return found

    def store(self, write: bool, source: int | None = None) -> None:
        assigned = self._take_assigned()
        if write:
            if source is not None:
                spread_from(source, self._buffer.flat, self._bucket.mesh)
            self._bucket.load_flat(self._buffer.flat)
        elif assigned or self._writes() != self._written or not self._bucket.equals_slice(self._buffer.flat):
            raise UsageError(
                f"parameters of unit {self._bucket.unit!r} were changed inside onecopy.gathered, and the changes "
                "would be lost: pass write=True to keep the first rank's changes, or edit copies."
            )


def _check_has_memory(engine: Engine) -> None:
    if any(bucket.device.type == "meta" for unit in engine.units for bucket in unit.buckets):
        raise UsageError(NO_MEMORY)


class _OpenedSlice:
    """A SlicedTensor of no bucket, such as a gradient, and its whole."""

    def __init__(self, sliced: SlicedTensor) -> None:
        self._sliced = sliced
        self._whole = gather_slices(sliced)
        self.shown = [(sliced, self._whole)]
        self._written = self._whole._version

    def close(self) -> None:
        """Nothing shows it but the block."""

    def store(self, write: bool, source: int | None = None) -> None:
        if write:
            local = local_of(self._whole)
            flat = local.reshape(-1).clone()
            spread_from(source, flat, mesh_of(self._sliced.slicing))
            local.copy_(flat.view(local.shape))
            self._sliced.copy_(self._whole)
        elif self._whole._version != self._written:
            raise UsageError(
                f"the tensor {self._sliced.slicing.name!r} was changed inside onecopy.gathered, and the change would "
                "be lost: pass write=True to keep one rank's changes, or edit a copy."
            )


def _refuse_gradient(parameter: Tensor) -> None:
    raise UsageError(
        "a backward ran inside onecopy.gathered, where its gradients would be lost: train outside of onecopy.gathered."
    )


def _slices_of(target: nn.Module | Tensor | Iterable[Tensor]) -> list[SlicedTensor]:
    if isinstance(target, nn.Module):
        found: list[Any] = [parameter for parameter in target.parameters() if not is_ignored(parameter)]
    else:
        found = [target] if isinstance(target, Tensor) else list(target or ())
    for tensor in found:
        if not isinstance(tensor, SlicedTensor):
            raise UsageError(
                "onecopy.gathered takes a model that onecopy.shard has sharded, a module in it, its parameters, their "
                f"gradients or states of its optimizer; found {type(tensor).__name__}. Inside another gathered block "
                f"parameters are whole already."
            )
    if not found:
        raise UsageError(
            "onecopy.gathered found no parameters in what it was given: pass a sharded model, a module of it, or "
            "sharded tensors."
        )
    return found


def _engine_of(parameter: SlicedTensor) -> Engine:
    engine = parameter._engine() if parameter._engine is not None else None
    if engine is None:
        raise UsageError(
            f"{parameter.slicing.name!r} belongs to a sharded model that no longer exists: keep the model as long as "
            "you use its parameters."
        )
    assert isinstance(engine, Engine)
    return engine


def _buckets_with(engine: Engine, wanted: list[SlicedTensor]) -> list[Bucket]:
    ids = {id(parameter) for parameter in wanted}
    return [
        bucket for unit in engine.units for bucket in unit.buckets if any(id(e.sliced) in ids for e in bucket.entries)
    ]
