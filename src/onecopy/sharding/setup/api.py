"""shard: the one call. It cuts a model into slices, in place, and leaves an engine that runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

import onecopy.sharding.tensor.operations  # noqa: F401  (fills SlicedTensor's table of rules)
from onecopy.activations.kept import Store
from onecopy.activations.policy import Activations
from onecopy.activations.store import make_store
from onecopy.comm.backends import time_limit
from onecopy.comm.device_meshes import device_mesh
from onecopy.comm.dtensors import local_of
from onecopy.comm.mesh import make_mesh
from onecopy.errors import SettingsError, UsageError
from onecopy.memory.arena import Arena
from onecopy.memory.staging import Staging
from onecopy.memory.store.movers import Movers
from onecopy.memory.store.offload import Offload
from onecopy.observe.ledger import Ledger, Phase
from onecopy.observe.meter import Meter
from onecopy.sharding.bucket.bucket import Bucket, FoundParameter
from onecopy.sharding.bucket.masters import Stores
from onecopy.sharding.bucket.owners import COMPANION
from onecopy.sharding.engine.buffers import equalise
from onecopy.sharding.engine.engine import ENGINE, Engine, find_engine
from onecopy.sharding.engine.unit import Unit
from onecopy.sharding.model.chosen import Whole
from onecopy.sharding.model.discover import Units, find_parameters, find_scopes, leave_small_to_root
from onecopy.sharding.model.ignored import Ignored, find_ignored, mark_ignored
from onecopy.sharding.model.statistics import widen_weights
from onecopy.sharding.model.structure import guard
from onecopy.sharding.setup.agreement import check_agreement, everywhere
from onecopy.sharding.setup.optimizers import check_holds, mark_replaced, remap, watch
from onecopy.sharding.setup.placing import check_can_be_whole, find_whole, group_parameters
from onecopy.sharding.setup.preconditions import (
    check_count,
    check_holds_once,
    check_kind,
    check_masters_are_wide,
    check_mirror,
    check_not_hooked,
    check_not_sharded,
)
from onecopy.sharding.setup.state_dicts import follow_state_dicts
from onecopy.sharding.setup.stores import make_stores
from onecopy.sharding.tensor.precision import Precision
from onecopy.sharding.tensor.sliced import SlicedTensor
from onecopy.sharding.tensor.tensor_parallel import describe, tensor_mesh
from onecopy.stage import Stage

_ARENA = "_onecopy_arena"

# Names the messages of buckets; models that are sharded one after the other must not share names.
_bucket_numbers = itertools.count()


ModelT = TypeVar("ModelT", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


def _outside_of_meta(function: Callable[P, R]) -> Callable[P, R]:
    """Inside `torch.device("meta")`, where the model may be built, messages are to have values all the same."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            return function(*args, **kwargs)

    return call


@_outside_of_meta
def shard(
    model: ModelT,
    stage: int,
    *,
    mesh: DeviceMesh | None = None,
    units: Units = "auto",
    ignored: Ignored = (),
    precision: Precision | str | None = None,
    accumulate: int = 1,
    prefetch: int = 1,
    prefetch_bytes: int | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    whole: Whole | None = None,
    broadcast_buffers: bool = True,
    activations: Activations | None = None,
    bucket_bytes: int | None = None,
    defragment: bool = False,
    offload: Offload | None = None,
    copies: int = 1,
    mirror: bool | str = False,
) -> ModelT:
    """Cut a model's states into slices over the ranks, in place. Every rank calls it with the same model and settings.

    Parameters and buffers take the first rank's values, as with DDP. Afterwards `model.parameters()` are
    `SlicedTensor`s, and the training loop stays as it was. The model gains two methods. `no_sync()` is a context for
    micro-batches that are not the last of a step. `reduce_gradients()` ends a step's micro-batches early. Gradients
    are averaged over ranks; the training loop divides the loss by the number of micro-batches.

    Args:
        model: any module, on the device where it is to train, or on meta (see `materialize`).
        stage: what is sharded. 0: nothing. 1: optimizer states. 2: gradients too. 3: parameters too.
        mesh: axes named "shard" and/or "replicate", and "tensor" where the model is tensor-parallel; None shards over
            all ranks of the default process group. Without a process group there is one rank.
        units: the modules whose parameters are gathered together: "auto", or modules, module classes, and names of
            modules or of their classes.
        ignored: parameters to leave as they are, modules that hold such parameters, or names of either. They stay plain
            and whole on each rank, with its own values and in their own dtype. The training loop must average their
            gradients itself, before it clips and steps.
        precision: "fp32", "bf16", "bf16-lean" (which holds gradients in bf16 too), "fp16", a `Precision`, or None to
            keep every parameter's own dtype.
        accumulate: micro-batches in a step. Stages 0 and 1 send gradients in the last one only.
        prefetch: how many units to gather ahead of the one that computes; 0: none.
        prefetch_bytes: gather further units ahead while the whole parameters of all of them hold no more than so many
            bytes. None: 0 on the CPU, 512 MiB elsewhere.
        optimizer: an optimizer that you made before this call, or several. They and their states are changed in place
            to the sliced parameters. Parameters that they need whole (Muon, Adafactor; `needs_whole`) are kept whole.
        whole: parameters kept whole in one rank's slice, where optimizers see plain tensors: a predicate
            (``lambda name, p: p.ndim == 2``), or a list of names, modules, classes of modules and parameters. Their
            owners are chosen over the whole model, so that all ranks compute and hold about the same amount.
        broadcast_buffers: before each training forward and before each step, give all ranks the first rank's buffers
            (running statistics, codebooks), so that they are equal when the model is evaluated or saved. False: each
            rank keeps its own.
        activations: whether to recompute units in backward, all of them or what is cheap, and whether their inputs are
            cut over the tensor axis or moved off the device. None leaves activations to the model.
        bucket_bytes: most bytes of one communication buffer; two buffers are in use. Gradients of larger units go
            through it in pieces. None: 4 MiB on the CPU, 2 GiB elsewhere, where a buffer is lent for one reduce.
        defragment: keep gradients and activation checkpoints in memory regions of their own (`arena`), so that tensors
            that live shorter leave no holes between them. The regions keep the memory that they have reserved.
        offload: where model states are kept while they are not computed with, at stages 1 to 3. None: on the device.
        copies: how many ranks hold each slice: hybrid sharding over ranks / copies, a mesh with a "replicate" axis.
        mirror: have the rank before hold every slice too and follow its updates, for `onecopy.resilient` to bring a
            lost rank back from; True: on the device, "cpu": in host memory (models on
            the CPU alone, so far).

    Returns:
        ``model``.

    Raises:
        SettingsError: for a setting that cannot work.
        UsageError: if the model, or a module in it, is sharded already.
        MismatchError: if ranks were given different models or settings.
        OffloadError: on every rank, if one has no room for the states that it offloads, or can make no file. The model
            is then as it was.
    """
    kind = Stage.of(stage)
    dtypes = Precision.of(precision)
    check_count("accumulate", accumulate, at_least=1)
    check_count("prefetch", prefetch, at_least=0)
    if prefetch_bytes is not None:
        check_count("prefetch_bytes", prefetch_bytes, at_least=0)
    if bucket_bytes is not None:
        check_count("bucket_bytes", bucket_bytes, at_least=1)
    check_kind("broadcast_buffers", broadcast_buffers, bool, "True or False")
    check_kind("defragment", defragment, bool, "True or False")
    check_kind("mesh", mesh, DeviceMesh | None, "a DeviceMesh (torch.distributed.init_device_mesh) or None")
    check_kind("activations", activations, Activations | None, "onecopy.Activations(...) or None")
    expected = "an optimizer of the model's parameters or None, or a list of optimizers"
    check_kind("optimizer", optimizer, Optimizer | list | tuple | None, expected)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    for one in optimizers:
        check_kind("optimizer", one, Optimizer, expected)
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    check_kind("offload", offload, Offload | None, "onecopy.Offload(...) or None")
    mesh = _with_copies(model, mesh, copies)
    if activations is not None:
        activations.check()
    if offload is not None:
        offload.check(kind)
        if offload.parameters is not None:
            # Each unit brought ahead holds pages too.
            prefetch, prefetch_bytes = offload.prefetch, prefetch_bytes or 0
    check_not_sharded(model)
    unsharded = find_ignored(model, ignored)
    scopes = find_parameters(model, find_scopes(model, units), unsharded.values())
    if units == "auto" and activations is None:
        # Inputs are cast at the entrance of every unit, so those that leave all parameters to the root stay units.
        kept: dict[str, list[FoundParameter]] = {scope: [] for scope in scopes} if dtypes.compute is not None else {}
        scopes = kept | leave_small_to_root(scopes)
    if not scopes:
        raise SettingsError(f"{type(model).__name__} has no parameters to shard")
    if activations is not None:
        activations.check_units((name, model.get_submodule(name)) for name in scopes)
    if offload is not None:
        check_masters_are_wide(scopes, dtypes, offload)
    device = next(item.parameter.device for found in scopes.values() for item in found)
    check_not_hooked(scopes)
    for one in optimizers:
        check_holds(one, model.parameters())
        check_holds_once(one, scopes)
    laid_whole = find_whole(model, scopes, whole, optimizers)
    ledger = Ledger()
    meter = Meter(ledger)
    ranks = make_mesh(
        mesh,
        shards=kind.shards_optimizer,
        ledger=ledger,
        staging=Staging(bucket_bytes, on_change=partial(meter.add, "communication")),
        tensor=tensor_mesh((item.name, item.parameter) for found in scopes.values() for item in found),
    )
    check_can_be_whole(scopes, laid_whole, ranks)
    check_mirror(mirror, ranks, kind, offload, device)
    settings = {
        "stage": stage,
        "precision": dtypes,
        "accumulate": accumulate,
        "prefetch": prefetch,
        "prefetch_bytes": prefetch_bytes,
        "broadcast_buffers": broadcast_buffers,
        "activations": activations,
        "bucket_bytes": bucket_bytes,
        "defragment": defragment,
        "offload": None if offload is None else offload.kinds,
        "mirror": mirror,
    }
    lines = [
        *(f"{name}={value}" for name, value in settings.items()),
        *(f"ignored parameter {name!r}" for name in unsharded),
        *(f"whole parameter {name!r} at a cost of {cost:g}" for name, cost in laid_whole.items()),
    ]
    check_agreement([*lines, *_describe_parameters(scopes), *_describe_buffers(model)], ranks)

    modules = dict(model.named_modules())
    regions = Arena() if defragment else None
    # A page is brought for all that is in it: another optimizer's parameters beside whole ones would be each step.
    companion = 0 if offload is not None and offload.on_disk("optimizer") else COMPANION
    groups = group_parameters(scopes, dtypes, laid_whole, ranks, companion=companion)
    # Before anything may fail, so that ranks go on with the same numbers.
    numbers = [next(_bucket_numbers) for _ in groups]

    def make_buckets() -> tuple[Store | None, Stores | None, dict[str, list[Bucket]]]:
        movers = Movers(meter, ledger)
        store = None if activations is None else make_store(activations.offload, meter, movers)
        stores = None if offload is None else make_stores(offload, movers, meter)
        made: dict[str, list[Bucket]] = {name: [] for name in scopes}
        for number, group in zip(numbers, groups, strict=True):
            bucket = Bucket(
                group.found,
                group.dtypes,
                trainable=group.trainable,
                mesh=ranks,
                meter=meter,
                index=number,
                unit=group.unit or "(root)",
                arena=regions,
                stores=stores,
                placing=group.placing,
            )
            made[group.unit].append(bucket)
        return store, stores, made

    # A disk may have no room, and the model is then as it was.
    offloads = offload is not None or (activations is not None and activations.offload is not None)
    store, stores, buckets = everywhere(make_buckets, ranks) if offloads else make_buckets()
    _fill(buckets, scopes)
    made = [Unit(name, modules[name], own) for name, own in buckets.items()]
    engine = Engine(
        model,
        made,
        stage=kind,
        mesh=ranks,
        ledger=ledger,
        meter=meter,
        inputs=dtypes.compute,
        accumulate=accumulate,
        prefetch=prefetch,
        prefetch_bytes=prefetch_bytes,
        syncs_buffers=broadcast_buffers,
        stores=stores,
        mirror=mirror,
        mesh_shape=None if mesh is None else (mesh.device_type, tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())),
    )
    if dtypes.compute is not None:
        widen_weights(model)
    if activations is not None and store is not None:
        activations.apply([(unit.name, unit.scope) for unit in made], ranks.tensor, store, meter, regions)
    if device.type != "meta":
        equalise(model, ranks)
    for one in optimizers:
        remap(one, _replacements(scopes, made))
    _retire(scopes)
    for parameter in unsharded.values():
        mark_ignored(parameter)
    watch(engine)
    guard(model)
    follow_state_dicts(model)
    for name, value in {
        ENGINE: engine,
        _ARENA: regions,
        "no_sync": engine.micro_batches.no_sync,
        "reduce_gradients": engine.reduce_gradients,
    }.items():
        setattr(model, name, value)
    return model


def _with_copies(model: nn.Module, mesh: DeviceMesh | None, copies: int) -> DeviceMesh | None:
    """The mesh of ``copies``, where that is more than one."""
    check_count("copies", copies, at_least=1)
    if copies == 1:
        return mesh
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if mesh is not None:
        raise SettingsError('copies= makes a mesh with a "replicate" axis: pass either it or mesh=, not both')
    if ranks % copies:
        raise SettingsError(f"copies={copies} does not divide the {ranks} ranks")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    group = dist.group.WORLD
    assert group is not None
    return device_mesh(
        "cpu" if device == "meta" else device, (copies, ranks // copies), ("replicate", "shard"), time_limit(group)
    )


def ledger(model: nn.Module) -> Ledger:
    """The ledger of a sharded model: the bytes that this rank has sent, per step and in total.

    Returns:
        The `Ledger`, which goes on counting.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    return engine_of(model).ledger


def meter(model: nn.Module) -> Meter:
    """The meter of a sharded model: the bytes that the model holds on this rank, by category.

    Returns:
        The `Meter`, which goes on counting.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    return engine_of(model).meter


def arena(model: nn.Module) -> Arena | None:
    """The regions in which a model that was sharded with ``defragment`` keeps gradients and activation checkpoints.

    Returns:
        The `Arena`; None of a model that was sharded without ``defragment``.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    engine_of(model)
    regions: Arena | None = getattr(model, _ARENA)
    return regions


def padded_numel(model: nn.Module) -> int:
    """The number of a sharded model's elements, with padding: what one gather of the whole model brings together.

    Returns:
        The Ψ by which the bytes of `ledger` are held against ZeRO §7.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    return sum(bucket.layout.padded_numel for unit in engine_of(model).units for bucket in unit.buckets)


@contextmanager
def phase_of(model: nn.Module, phase: Phase) -> Iterator[None]:
    """Book traffic and peaks inside the block under ``phase``, if ``model`` is sharded."""
    engine = find_engine(model)
    if engine is None:
        yield
        return
    with engine.ledger.during(phase):
        engine.meter.mark()
        yield


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    engine = find_engine(model)
    if engine is None:
        raise UsageError(f"this {type(model).__name__} is not sharded; pass the model that onecopy.shard returned.")
    return engine


def _fill(buckets: dict[str, list[Bucket]], scopes: dict[str, list[FoundParameter]]) -> None:
    """Give slices the first rank's values, and modules the slices."""
    for name, own in buckets.items():
        parameters = {item.name: item.parameter for item in scopes[name]}
        for bucket in own:
            if bucket.device.type != "meta":
                bucket.load(parameters[entry.name] for entry in bucket.entries)
            bucket.show_sliced()


def _retire(scopes: dict[str, list[FoundParameter]]) -> None:
    """Free the parameters as they were, whoever holds them still, and know them again in an optimizer."""
    for found in scopes.values():
        for item in found:
            for parameter in (item.parameter, *item.twins):
                mark_replaced(parameter, item.name)
                local = local_of(parameter)
                local.data = local.data.new_empty(0)


def _replacements(scopes: dict[str, list[FoundParameter]], units: Sequence[Unit]) -> dict[nn.Parameter, SlicedTensor]:
    sliced = {entry.name: entry.sliced for unit in units for bucket in unit.buckets for entry in bucket.entries}
    return {
        parameter: sliced[item.name]
        for found in scopes.values()
        for item in found
        for parameter in (item.parameter, *item.twins)
    }


def _describe_buffers(model: nn.Module) -> list[str]:
    return [f"buffer {name!r} of shape {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in model.named_buffers()]


def _describe_parameters(scopes: dict[str, list[FoundParameter]]) -> list[str]:
    return [
        f"unit {name or '(root)'!r} parameter {item.name!r} of shape {tuple(item.parameter.shape)}, "
        f"{item.parameter.dtype}, requires_grad={item.parameter.requires_grad}{describe(item.parameter)}"
        for name, found in scopes.items()
        for item in found
    ]
