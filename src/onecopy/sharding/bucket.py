"""Bucket: the parameters of one unit that share dtypes and `requires_grad`, in one flat buffer cut into N slices.

A bucket knows how to make itself whole (gather) and how to give that memory back (release); its gradients are in
`gradients.py`, and when to do what is the schedule's business. Its memory:

==========  ============  =============================================================================
``master``  one slice     the values that the optimizer updates; the sliced parameters are views of it
``whole``   all elements  the gathered copy in the compute dtype; *is* ``master`` where nothing is cut or cast
==========  ============  =============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from onecopy.comm.collective import Collective
from onecopy.comm.dtensors import address_of, is_dtensor, local_of
from onecopy.comm.mesh import Mesh
from onecopy.errors import UsageError
from onecopy.memory.arena import Arena
from onecopy.memory.meter import Meter
from onecopy.sharding.flat import FlatBuffer
from onecopy.sharding.layout import ALIGNMENT, Cut, Layout
from onecopy.sharding.precision import Dtypes
from onecopy.sharding.sliced import SlicedTensor, Slicing, dense_strides, flatten
from onecopy.sharding.tensor_parallel import spec_of

NO_MEMORY: Final = (
    "the model was sharded on the meta device and has no values yet: call onecopy.materialize(model, device), or "
    "onecopy.load_pretrained(model, directory), before it is used."
)

Place = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


@dataclass(frozen=True)
class Found:
    """A parameter as the model was built, every place that holds it, and other objects over the very same memory."""

    name: str
    parameter: nn.Parameter
    places: tuple[Place, ...]
    twins: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter of a bucket.

    Attributes:
        name: its fully qualified name; the first one where it is tied.
        places: every place that holds it.
        sliced: what they hold while the model is not computing.
        shown: the same object, as the `nn.Parameter` that it is to modules.
        whole: what they hold while the unit computes: a leaf, whose gradient autograd fills. Plain, or a DTensor where
            the parameter was one.
    """

    name: str
    places: tuple[Place, ...]
    sliced: SlicedTensor
    shown: nn.Parameter
    whole: nn.Parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Let modules hold ``parameter``."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter


class Bucket:
    """See the file's first lines.

    Args:
        found: its parameters, all on one device and of the same ``dtypes``.
        trainable: their `requires_grad`.
        meter: where its bytes are counted.
        index: number of the bucket in the model, the same on every rank; it names the bucket's messages.
        unit: name of its unit, for the ledger.
        arena: where gradients lie, apart from what lives shorter; None takes them from PyTorch.

    Attributes:
        changes: how often the parameters were written to since they were sharded.
    """

    def __init__(
        self,
        found: Sequence[Found],
        dtypes: Dtypes,
        *,
        trainable: bool,
        mesh: Mesh,
        meter: Meter,
        index: int,
        unit: str,
        arena: Arena | None = None,
    ) -> None:
        self.dtypes = dtypes
        self.trainable = trainable
        self.mesh = mesh
        self.meter = meter
        self.unit = unit
        self._arena = arena
        self.tag = 16 * index
        self.changes = 0
        self.specs = [spec_of(f.parameter, mesh.tensor) for f in found]
        local = [local_of(f.parameter) for f in found]
        self.shapes = [tensor.shape for tensor in local]
        self.strides = [dense_strides(tensor) for tensor in local]
        numels = tuple(tensor.numel() for tensor in local)
        self.layout = Layout(numels, mesh.shard.size, ALIGNMENT * mesh.copies)
        self._segments = self.layout.segments(mesh.shard.rank)
        self._cut = Cut([(s.slice_start, s.numel) for s in self._segments], self.layout.slice_numel)
        self.place_on(found[0].parameter.device, found)

    def place_on(self, device: torch.device, found: Sequence[Found]) -> None:
        """Make slices and parameters anew on ``device``; values are zero until `load`."""
        self.device = device
        self.master = torch.zeros(self.layout.slice_numel, dtype=self.dtypes.master, device=device)
        self._aliased = self.mesh.shard.size == 1 and self.dtypes.compute == self.dtypes.master
        self._whole = self.buffer(self.dtypes.compute, self.master if self._aliased else None)
        if not self._aliased:
            self._whole.free()
        if device.type != "meta":
            self.meter.add("parameters_sliced", self.master.nbytes)
        self._fresh = self._aliased and device.type != "meta"
        self._gathering: Collective | None = None
        self._sent_from_whole: Collective | None = None
        self.entries = [
            self._entry(position, item, local)
            for position, (item, local) in enumerate(zip(found, self.split(self.master), strict=True))
        ]
        self._dtensors = [entry.whole for entry in self.entries if is_dtensor(entry.whole)]
        self._version = self._whole_version

    def _entry(self, position: int, found: Found, local: Tensor) -> Entry:
        segment = self._segments[position]
        spec = self.specs[position]
        slicing = Slicing(
            found.name,
            spec.shape if spec else self.shapes[position],
            spec.strides if spec else self.strides[position],
            segment.parameter_start,
            segment.numel,
            self.mesh.shard,
            spec,
            self.mesh.tensor.rank > 0 and not (spec is not None and spec.is_cut),
        )
        shown = nn.Parameter(SlicedTensor(local, slicing, on_write=self._written), self.trainable)
        sliced: Tensor = shown
        assert isinstance(sliced, SlicedTensor)
        whole = self.as_parameter(position, self._whole.views[position])
        for attribute, value in vars(found.parameter).items():
            if attribute not in vars(sliced):
                setattr(sliced, attribute, value)
                setattr(whole, attribute, value)
        return Entry(found.name, found.places, sliced, shown, whole)

    def as_parameter(self, position: int, view: Tensor) -> nn.Parameter:
        """What modules may hold for parameter ``position``, over the memory of ``view``."""
        spec = self.specs[position]
        return nn.Parameter(view if spec is None else spec.wrap(view), self.trainable)

    def buffer(self, dtype: torch.dtype, memory: Tensor | None = None) -> FlatBuffer:
        """A buffer for the whole bucket, over new memory of undefined content unless ``memory`` is given."""
        if memory is None:
            with torch.inference_mode(False):
                memory = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        return FlatBuffer(self.layout, self.shapes, self.strides, memory)

    def empty_gradients(self, numel: int) -> Tensor:
        """Memory for ``numel`` elements of gradients, in the accumulate dtype."""
        dtype = self.dtypes.accumulate
        if self._arena is not None:
            return self._arena.empty("gradients", numel, dtype, self.device)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def split(self, flat_slice: Tensor) -> list[Tensor]:
        """The part of every parameter in this rank's slice, 1-D."""
        return self._cut(flat_slice)

    def show_sliced(self) -> None:
        """Let modules hold the sliced parameters again.

        Raises:
            UsageError: if whole parameters were written to meanwhile, which would be lost.
        """
        if self._whole_version != self._version:
            self._version = self._whole_version
            raise UsageError(
                f"parameters of unit {self.unit!r} were written to while it computed, which would be lost: edit them "
                f"outside of forward, inside `with onecopy.gathered(model, write=True):`."
            )
        for entry in self.entries:
            for module, attribute in entry.places:
                module._parameters[attribute] = entry.shown

    @property
    def _whole_version(self) -> int:
        """Counts writes to the whole parameters. A DTensor counts its own, apart from the memory's."""
        return self._whole.views[0]._version + sum(whole._version for whole in self._dtensors)

    def show_whole(self) -> None:
        """Let modules hold the whole parameters; only while they are gathered."""
        assert self._fresh, f"unit {self.unit!r} is not gathered"
        for entry in self.entries:
            for module, attribute in entry.places:
                module._parameters[attribute] = entry.whole

    # --- values

    def load(self, whole: Iterable[Tensor]) -> None:
        """Set the slices from whole parameters; those of the mesh's first rank count. It sends (N-1)/N of them.

        Plain parameters are made equal over the tensor axis too.
        """
        flat = torch.zeros(self.layout.padded_numel, dtype=self.dtypes.master, device=self.device)
        for tensor, offset, numel, strides, spec in zip(
            whole, self.layout.offsets, self.layout.numels, self.strides, self.specs, strict=True
        ):
            part = flat[offset : offset + numel]
            part.copy_(flatten(local_of(tensor).detach(), strides))
            if spec is None:
                self.mesh.tensor.broadcast(part, self.unit, self.tag + 11)
        self.load_flat(flat)

    def load_flat(self, flat: Tensor) -> None:
        """As `load`, from a flat buffer in the master dtype."""
        with torch.no_grad():
            self.mesh.shard.scatter(flat, self.master, self.unit, self.tag + 8)
            for position, axis in enumerate(self.mesh.replicate):
                axis.broadcast(self.master, self.unit, self.tag + 9 + position)
        self._written()

    def gather_masters(self) -> FlatBuffer:
        """The whole parameters in the master dtype, gathered into a new buffer."""
        whole = self.buffer(self.dtypes.master)
        if collective := self.mesh.shard.all_gather(self.master, whole.flat, self.unit, self.tag + 2):
            collective.finish()
            self.mesh.shard.settle()
        return whole

    def equals_slice(self, flat: Tensor) -> bool:
        """Whether this rank's part of ``flat`` (master dtype) is bit for bit what its slice holds."""
        return torch.equal(self._own_part(flat).view(torch.uint8), self.master.view(torch.uint8))

    def _written(self) -> None:
        """The slices changed: a gathered copy is stale, and so is any graph that was built with it."""
        self.changes += 1
        self.finish_gather()
        self._fresh = self._aliased

    def _own_part(self, flat: Tensor) -> Tensor:
        start = self.mesh.shard.rank * self.layout.slice_numel
        return flat[start : start + self.layout.slice_numel]

    # --- gather and release

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered, or a gather is under way."""
        return self._fresh or self._gathering is not None

    def start_gather(self, *, backward: bool) -> None:
        """Begin to make the parameters whole, unless they are or it has begun. Sends (N-1)/N of the bucket."""
        if self.is_whole:
            return
        if self.device.type == "meta":
            raise UsageError(NO_MEMORY)
        if self._whole.allocate():
            self.meter.add("parameters_gathered", self._whole.nbytes)
        mine = self.master
        if self.dtypes.compute != self.dtypes.master and self.mesh.shard.size > 1:
            mine = self._own_part(self._whole.flat).copy_(mine)
        self._gathering = self.mesh.shard.all_gather(mine, self._whole.flat, self.unit, self.tag + backward)
        self._sent_from_whole = None if mine is self.master else self._gathering
        self._fresh = self._gathering is None

    def finish_gather(self) -> None:
        """Wait until a gather that was begun is complete."""
        if self._gathering is not None:
            self._gathering.finish()
            self._gathering = None
            self._fresh = True

    def release(self) -> None:
        """Give the memory of the whole parameters back."""
        self.finish_gather()
        if self._sent_from_whole is not None:
            self._sent_from_whole.settle()
            self._sent_from_whole = None
        if not self._aliased:
            if self._whole.free():
                self.meter.add("parameters_gathered", -self._whole.nbytes)
            self._fresh = False

    def shows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at the whole parameters."""
        memory = self._whole.flat.untyped_storage().data_ptr()
        return memory != 0 and address_of(tensor) == memory

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at memory that `release` gives back."""
        return not self._aliased and self.shows(tensor)

    def check(self) -> None:
        """Raise `UsageError` if a parameter was replaced, hooked, frozen or unfrozen since, or has no memory yet."""
        if self.device.type == "meta":
            raise UsageError(NO_MEMORY)
        for entry in self.entries:
            if entry.sliced.requires_grad is not self.trainable:
                raise UsageError(
                    f"requires_grad of {entry.name!r} was {self.trainable} when onecopy.shard was called and is "
                    f"{entry.sliced.requires_grad} now: freeze and unfreeze before sharding."
                )
            if entry.sliced._backward_hooks or entry.sliced._post_accumulate_grad_hooks:
                raise UsageError(
                    f"parameter {entry.name!r} has gradient hooks, which do not run on sharded parameters: read "
                    f"p.grad after backward instead."
                )
            if any(module._parameters.get(attribute) is not entry.shown for module, attribute in entry.places):
                raise UsageError(
                    f"parameter {entry.name!r} was replaced after onecopy.shard; edit it in place inside "
                    f"`with onecopy.gathered(model, write=True):` instead."
                )
