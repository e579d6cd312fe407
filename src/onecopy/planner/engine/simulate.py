"""Simulate: the real engine on fake tensors and fake ranks, at any N, in one process and without memory.

What it reports is counted by the engine's own meter and ledger. The planner's formulas (`step.py`) are held against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecopy
from onecopy.observe.meter import Meter
from onecopy.planner.engine.fake import AnyValues, fake_ranks, fake_tensors
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
        alive = _AliveAfterUnits() if temporaries else None
        seen = _SavedByUnit(alive)
        if batch is not None:
            dtype = Precision.of(precision).compute
            _cast_parameters(model, dtype)
            seen.watch(model, list(numels))
            inputs = replace_tensors(batch(), lambda t: t.to(dtype) if dtype and t.is_floating_point() else t)
            with alive or nullcontext():
                with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor):
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
            logits=0 if name else max(seen.tail, alive.most if alive is not None else 0),
            frozen=frozen.get(name, ()),
            frozen_width=widths.get(name, 4),
            matrices=matrices.get(name, ()),
        )
        for name in names
    ]


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


class _SavedByUnit:
    """Bytes of storages that autograd saves, each once and under the unit whose forward saved it first.

    Attributes:
        order: of the units' forwards.
        tail: bytes that the root saved after the last inner unit.
        inputs: for each unit that `onecopy.Activations` would checkpoint, bytes of the arguments that it would keep.
    """

    def __init__(self, alive: _AliveAfterUnits | None = None) -> None:
        self._alive = alive
        self.tail = 0.0
        self._nbytes: dict[str, float] = {}
        self.order: list[str] = []
        self.inputs: dict[str, float] = {}
        self._whole: set[StorageWeakRef] = set()
        self._seen: dict[StorageWeakRef, Tensor] = {}
        self._inside = [""]

    def watch(self, model: nn.Module, units: Sequence[str]) -> None:
        self._whole = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        for name, module in ((name, model.get_submodule(name)) for name in filter(None, units)):
            if next(module.children(), None) is not None and not any(name.startswith(f"{n}.") for n in self.inputs):
                self.inputs[name] = 0.0
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._enter(name, [*args, *kwargs.values()]), with_kwargs=True
            )
            module.register_forward_hook(lambda _, __, output: self._leave(output))

    def kept(self, name: str) -> float:
        """Bytes of a unit; of the root, those before its last inner unit."""
        return self._nbytes.get(name, 0.0)

    def _enter(self, name: str, arguments: list[Any]) -> None:
        if name in self.inputs:
            kept = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
            self.inputs[name] += sum(tensor.numel() * tensor.element_size() for tensor in kept)
        self._nbytes[""] = self._nbytes.get("", 0.0) + self.tail
        self.tail = 0.0
        self._inside.append(name)
        if name not in self.order:
            self.order.append(name)

    def _leave(self, output: Any) -> None:
        self._inside.pop()
        if self._alive is not None:
            self._alive.begin(output)

    def forget(self) -> None:
        """Let go of what was seen: what autograd alone keeps lives no longer than it keeps it."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key not in self._whole and key not in self._seen:
            # Kept, so that no later storage is taken for this one.
            self._seen[key] = tensor
            where = self._inside[-1]
            if where:
                self._nbytes[where] = self._nbytes.get(where, 0.0) + storage.nbytes()
            else:
                self.tail += storage.nbytes()
        return tensor


class _AliveAfterUnits(TorchDispatchMode):
    """Bytes of storages made after the last inner unit's forward and before its backward, the most at any moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known: dict[StorageWeakRef, weakref.finalize[..., Any]] = {}
        self._counts = False

    def begin(self, output: Any) -> None:
        """A unit's forward has ended with ``output``: what counts begins here, and ends with the gradient of that."""
        self.most = self._now = 0
        self._counts = True
        for key in list(self._known):
            self._known.pop(key).detach()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._end)

    def _end(self, _: Tensor) -> None:
        self._counts = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counts:
            given = {StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[StorageWeakRef]) -> None:
        key = StorageWeakRef(storage)
        # What an operation was given is no work of its own.
        if key in self._known or key in given:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._gone, key, nbytes)
        self._now += nbytes
        self.most = max(self.most, self._now)

    def _gone(self, key: StorageWeakRef, nbytes: int) -> None:
        if self._known.pop(key, None) is not None:
            self._now -= nbytes


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
