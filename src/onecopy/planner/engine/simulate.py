"""Simulate: the real engine on fake tensors and fake ranks, at any N, in one process and without memory.

What it reports is counted by the engine's own meter and ledger. The planner's formulas (`step.py`) are held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

import onecopy
from onecopy.observe.meter import Meter
from onecopy.planner.engine.fake import AnyValues, fake_ranks, fake_tensors
from onecopy.planner.engine.saved import AliveAfterUnits, Products, SavedByUnit
from onecopy.planner.formulas.buffers import STAGING_BYTES
from onecopy.planner.model.schedule import Schedule, Sizes, Unit
from onecopy.sharding.graph.tensors import replace_tensors
from onecopy.sharding.model.chosen import hidden_matrices
from onecopy.sharding.model.discover import Units, find_parameters, find_scopes, leave_small_to_root
from onecopy.sharding.setup.api import engine_of
from onecopy.sharding.tensor.precision import Precision

Batch = dict[str, Any] | tuple[Any, ...]
Build = Callable[[], nn.Module]
MakeBatch = Callable[[], Batch]


@dataclass(frozen=True)
class Simulated:
    """One step of the engine, the second, when everything exists.

    Attributes:
        peaks: for "forward", "backward" and "step" the meter's categories in bytes at the highest moment.
        held: the categories after the step, gradients still there.
        bytes_sent: of model states, by this rank.
        padded_parameters: Ψ with padding.
    """

    peaks: dict[str, Sizes]
    held: Sizes
    bytes_sent: int
    padded_parameters: int


def simulate(
    build: Build,
    batch: MakeBatch,
    plan: Schedule,
    *,
    precision: str | None = "bf16",
    activations: onecopy.Activations | None = None,
) -> Simulated:
    """Run two steps of forward, backward and AdamW as rank 0 of ``plan.shard * plan.replicate`` ranks.

    Args:
        build: makes the model.
        batch: makes one micro-batch, the model's keyword or positional arguments. The output is a loss, or has one as
            attribute ``loss``; of another output the sum is taken.
        plan: what to run; its widths follow from ``precision`` and are not read.
        precision: as `onecopy.shard` takes it.
        activations: likewise.

    Raises:
        UsageError: if a process group exists already.
    """
    with fake_ranks(plan.shard, plan.replicate) as mesh:
        with AnyValues():
            built = build()
        model = onecopy.shard(
            built,
            plan.stage,
            mesh=mesh,
            precision=precision,
            accumulate=plan.micro_batches,
            prefetch=plan.prefetch,
            prefetch_bytes=plan.prefetch_bytes,
            activations=activations,
            # Fake tensors are of the CPU, and the ranks stand for accelerators.
            bucket_bytes=STAGING_BYTES["accelerator"],
        )
        kinds: dict[str, dict[str, Any]] = {
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "for-loop": {"foreach": False},
        }
        optimizer = torch.optim.AdamW(model.parameters(), **kinds[plan.implementation])
        meter = onecopy.meter(model)
        for _ in range(2):
            meter.reset_peaks()
            starts: list[dict[str, int]] = []
            for _ in range(plan.micro_batches):
                with _counted_activations(meter, model):
                    loss = loss_of(call(model, batch()))
                    starts.append(dict(meter.live))
                    loss.backward()
                    del loss
            optimizer.step()
            held = {name: float(size) for name, size in meter.live.items()}
            peaks: dict[str, Sizes] = {phase: _floats(peak) for phase, peak in meter.peaks.items()}
            # The meter looks when something is allocated; backward begins with what forward has left.
            peaks["backward"] = max(peaks["backward"], *map(_floats, starts), key=lambda sizes: sum(sizes.values()))
            # Nothing grows in the step, so that its peak is what is held.
            peaks["step"] = dict(held)
            optimizer.zero_grad()
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        return Simulated(peaks, held, traffic.state_bytes, onecopy.padded_numel(model))


def describe_units(
    build: Build,
    batch: MakeBatch | None,
    *,
    units: Units = "auto",
    precision: str | None = "bf16",
    temporaries: bool = False,
) -> list[Unit]:
    """A model's units in the order of its forward, with the bytes that each keeps for backward.

    Args:
        build: makes the model; it runs under fake tensors, and needs no memory.
        batch: makes one micro-batch; None leaves activations at 0 and the order that of `model.named_modules()`.
        units: as `onecopy.shard` takes it.
        precision: likewise.
        temporaries: run backward too, and let the root's ``logits`` be all that is alive of head and loss at their
            highest moment, as a device holds it; else what autograd keeps of them, as the meter counts it.
    """
    with fake_tensors():
        with AnyValues():
            model = build()
        scopes = find_parameters(model, find_scopes(model, units))
        if units == "auto":
            scopes = leave_small_to_root(scopes)
        found = {name: [item.parameter for item in items] for name, items in scopes.items()}
        numels = {name: tuple(p.numel() for p in items if p.requires_grad) for name, items in found.items()}
        frozen = {name: tuple(p.numel() for p in items if not p.requires_grad) for name, items in found.items()}
        of_muon = {*hidden_matrices(model)}
        matrices = {
            name: tuple(tuple(item.parameter.shape) for item in items if item.name in of_muon)
            for name, items in scopes.items()
        }
        widths = {
            name: max((p.element_size() for p in items if not p.requires_grad), default=4)
            for name, items in found.items()
        }
        features = {name: _features(model.get_submodule(name)) for name in scopes if name}
        alive = AliveAfterUnits() if temporaries else None
        seen = SavedByUnit(alive)
        if batch is not None:
            dtype = Precision.of(precision).compute
            _cast_parameters(model, dtype)
            seen.watch(model, list(numels))
            inputs = replace_tensors(batch(), lambda t: t.to(dtype) if dtype and t.is_floating_point() else t)
            with alive or nullcontext():
                with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor), Products(seen):
                    # Kept through backward, as in a loop that has a name for it.
                    output = call(model, inputs)
                    loss = loss_of(output)
                if alive is not None and loss.requires_grad:
                    seen.forget()
                    loss.backward()
            del output, loss
    names = ["", *(name for name in seen.order if name), *(name for name in numels if name and name not in seen.order)]
    return [
        Unit(
            name,
            numels.get(name, ()),
            seen.kept(name),
            inputs=seen.inputs.get(name),
            products=seen.products(name),
            repeated=seen.repeated(name),
            features=features.get(name, 0),
            logits=0 if name else max(seen.tail, alive.most if alive is not None else 0),
            frozen=frozen.get(name, ()),
            frozen_width=widths.get(name, 4),
            matrices=matrices.get(name, ()),
        )
        for name in names
    ]


def _features(scope: nn.Module) -> int:
    """Numbers that the matrix products of a unit make of each token; 0 if not all of its matrices are linear layers."""
    found, counted = 0, set()
    for module in scope.modules():
        # As linear layers call it, and the `Conv1D` of transformers.
        outputs = getattr(module, "out_features", None) or getattr(module, "nf", None)
        if isinstance(outputs, int) and isinstance(weight := getattr(module, "weight", None), Tensor):
            found += outputs
            counted.add(id(weight))
    return found if all(p.dim() < 2 or id(p) in counted for p in scope.parameters()) else 0


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch of keyword or positional arguments."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output, or the sum of its logits, or of all that has a gradient."""
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    logits = getattr(output, "logits", None)
    leaves = [logits] if logits is not None else tree_leaves(output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # All of it where nothing is trained.
    chosen = [leaf for leaf in found if leaf.requires_grad] or found
    parts = [leaf if leaf.dim() == 0 else leaf.float().sum() for leaf in chosen]
    return sum(parts[1:], start=parts[0])


def _floats(sizes: dict[str, int]) -> Sizes:
    return {name: float(size) for name, size in sizes.items()}


def _cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give every place of a parameter one in the compute dtype, as the engine shows it there; buffers keep theirs."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and dtype is not None and parameter.is_floating_point():
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = made[parameter]


def _whole_storages(model: nn.Module) -> set[StorageWeakRef]:
    """Where whole parameters lie; they are no activations."""
    return {
        StorageWeakRef(entry.whole.untyped_storage())
        for unit in engine_of(model).units
        for bucket in unit.buckets
        for entry in bucket.entries
    }


@contextmanager
def _counted_activations(meter: Meter, model: nn.Module) -> Iterator[None]:
    """Count what autograd saves; `onecopy.profile` cannot, for fake storages have no address."""
    whole = _whole_storages(model)
    holders: dict[StorageWeakRef, int] = {}

    def pack(tensor: Tensor) -> Any:
        key = StorageWeakRef(tensor.untyped_storage())
        return tensor if key in whole else _Held(tensor, key, holders, meter)

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor = packed.tensor if isinstance(packed, _Held) else packed
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Held:
    """A saved tensor; lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, key: StorageWeakRef, holders: dict[StorageWeakRef, int], meter: Meter) -> None:
        self.tensor = tensor
        self._key, self._holders, self._meter = key, holders, meter
        self._nbytes = tensor.untyped_storage().nbytes()
        holders[key] = holders.get(key, 0) + 1
        if holders[key] == 1:
            meter.add("activations", self._nbytes)

    def __del__(self) -> None:
        self._holders[self._key] -= 1
        if not self._holders[self._key]:
            del self._holders[self._key]
            self._meter.add("activations", -self._nbytes)
