"""Bucket: the parameters of one unit that share dtypes and `requires_grad`, in one flat buffer cut into N slices.

A bucket knows how to make itself whole (gather) and how to give that memory back (release); its gradients are in
`gradients.py`, and when to do what is the schedule's business. Its memory:

============  ============  =============================================================================
``master``    one slice     the values that the optimizer updates; the sliced parameters are views of it
``lent``      one slice     what gathers read; *is* ``master`` but where that rests elsewhere (`masters.py`)
``whole``     all elements  the gathered copy in the compute dtype; *is* ``lent`` where nothing is cut or cast
============  ============  =============================================================================

    SLICED ──start_gather──▶ GATHERING ──finish_gather──▶ WHOLE ──release, or a write──▶ SLICED

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py: `Tensor._use_count` and
`torch._C._storage_Use_Count`, by which a bucket knows that somebody still holds its whole parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import partial
from sys import getrefcount
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version

from onecopy.comm.collective import Collective
from onecopy.comm.dtensors import address_of, is_dtensor, local_of
from onecopy.comm.mesh import Mesh
from onecopy.comm.shelf import Shelf
from onecopy.errors import UsageError
from onecopy.memory.arena import Arena
from onecopy.memory.store.pages import Page
from onecopy.observe.meter import Meter
from onecopy.sharding.bucket.flat import FlatBuffer
from onecopy.sharding.bucket.layout import ALIGNMENT, Cut, Layout
from onecopy.sharding.bucket.masters import Fetching, Stores, make_masters
from onecopy.sharding.bucket.owners import Placing
from onecopy.sharding.tensor.precision import Dtypes
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing, dense_strides, flatten
from onecopy.sharding.tensor.tensor_parallel import spec_of

NO_MEMORY: Final = (
    "the model was sharded on the meta device and has no values yet: call onecopy.materialize(model, device), or "
    "onecopy.load_pretrained(model, directory), before it is used."
)

Place = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""

POISON: Final = os.environ.get("ONECOPY_POISON", "0") != "0"
"""For tests: memory that is not whole holds NaN, so that whoever reads it too early is found out."""


class State(Enum):
    """Where the whole parameters are."""

    SLICED = "sliced"
    GATHERING = "gathering"
    WHOLE = "whole"


class Message(IntEnum):
    """What a bucket's messages are about: added to its number, this names them. Some take two names, or one an axis."""

    FORWARD = 0
    BACKWARD = 1
    MASTERS = 2
    REDUCE = 3
    COMBINE = 4
    LOAD = 8
    COPY = 9
    TENSOR = 11


class WholeParameter(nn.Parameter):
    """What modules hold while their unit computes, over the gathered memory.

    ``data`` shares the version counter, which that of a plain parameter does not, so that no write goes unnoticed.
    """

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise UsageError(
            "a forward assigned to a parameter's .data. The assignment would be lost, because the parameter is "
            "sharded: edit parameters outside of forward, inside `with torch.no_grad(), onecopy.gathered(model, "
            "write=True):`."
        )


@dataclass(frozen=True)
class FoundParameter:
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
        node: where autograd puts that gradient; kept, for the number of those who hold ``whole`` not to vary with it.
    """

    name: str
    places: tuple[Place, ...]
    sliced: SlicedTensor
    shown: nn.Parameter
    whole: nn.Parameter
    node: object | None

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
        stores: where slices rest; None: on the device.
        placing: which parameters lie in one slice, and in whose; None: slices cut anywhere, into equal parts.

    Attributes:
        slice_numel: elements of this rank's slice.
        segments: what this rank's slice holds, parameter by parameter.
        masters: this rank's slice.
        changes: how often the parameters were written to since they were sharded.
        is_opened: whether modules show them whole, inside `onecopy.gathered`.
        before_write: called when they are about to be, on every rank; None while nobody else reads them.
        shelf: where ``master`` lies for other ranks to fetch (`versions.py`); None where all gather together.
        state: where the whole parameters are.
    """

    def __init__(
        self,
        found: Sequence[FoundParameter],
        dtypes: Dtypes,
        *,
        trainable: bool,
        mesh: Mesh,
        meter: Meter,
        index: int,
        unit: str,
        arena: Arena | None = None,
        stores: Stores | None = None,
        placing: Placing | None = None,
    ) -> None:
        self._stores = stores
        self.dtypes = dtypes
        self.trainable = trainable
        self.mesh = mesh
        self.meter = meter
        self.unit = unit
        self._arena = arena
        self.tag = 16 * index
        self.changes = 0
        self.is_opened = False
        self.before_write: Callable[[], None] | None = None
        self.shelf: Shelf | None = None
        self._version = 0
        self.specs = [spec_of(f.parameter, mesh.tensor) for f in found]
        local = [local_of(f.parameter) for f in found]
        self.shapes = [tensor.shape for tensor in local]
        self.strides = [dense_strides(tensor) for tensor in local]
        numels = tuple(tensor.numel() for tensor in local)
        owners, shares = (None, None) if placing is None else (placing.owners, placing.shares)
        self._whole_names = frozenset() if placing is None else placing.whole
        self._lay(Layout(numels, mesh.shard.size, ALIGNMENT * mesh.copies, owners, shares), mesh.shard.rank)
        self.place_on(found[0].parameter.device, found)

    def _lay(self, layout: Layout, place: int) -> None:
        """Let elements lie as ``layout`` says, and this rank's slice be that of ``place``."""
        self.layout = layout
        self.slice_numel = layout.lengths[place]
        self.segments = layout.segments(place)
        self._cut = Cut([(s.slice_start, s.numel) for s in self.segments], self.slice_numel)

    def place_on(self, device: torch.device, found: Sequence[FoundParameter]) -> None:
        """Make slices and parameters anew on ``device``; values are zero until `load`."""
        self.device = device
        self._take_memory()
        self.entries = [
            self._entry(position, item, local)
            for position, (item, local) in enumerate(zip(found, self._sliced_masters(), strict=True))
        ]
        self._watch_writes()

    def _take_memory(self) -> None:
        """Memory for this rank's slice, of zeros, and for what is gathered."""
        device = self.device
        self.masters = make_masters(self._stores, self.slice_numel, self.dtypes, device, trainable=self.trainable)
        lent = self.masters.lent
        self._aliased = self.layout.num_slices == 1 and lent is not None and lent.dtype == self.dtypes.compute
        self._aliased &= lent is not None and lent.device.type == device.type
        self._whole = self.buffer(self.dtypes.compute, lent if self._aliased else None)
        if not self._aliased:
            self._whole.free()
        if device.type != "meta":
            self.meter.add("parameters_sliced", self.masters.held_bytes)
        self.state = State.WHOLE if self._aliased and device.type != "meta" else State.SLICED
        self._gathering: Collective | Fetching | None = None
        self.storage = self._whole.flat.untyped_storage()
        self._holders: list[int] | None = None

    def _watch_writes(self) -> None:
        self._dtensors = [entry.whole for entry in self.entries if is_dtensor(entry.whole)]
        self._writes = self._count_writes()

    def layout_among(self, shards: int, copies: int) -> Layout:
        """How elements lie where so many slices are held by so many ranks each."""
        return replace(self.layout, num_slices=shards, multiple=ALIGNMENT * copies)

    def recut(self, layout: Layout, place: int, master: Tensor | None) -> None:
        """Hold another slice from now on. Parameters stay the objects that they are.

        Gradients, and graphs of forwards before this, are of no use any more. Nothing is gathered or sent.

        Args:
            layout: how elements are to lie; of the same parameters.
            place: whose slice in it this rank is to hold.
            master: what that holds, in the master dtype; None: zeros.
        """
        self.changes += 1
        self.meter.add("parameters_sliced", -self.masters.held_bytes)
        if self._whole.is_allocated and not self._aliased:
            self.meter.add("parameters_gathered", -self._whole.nbytes)
        self._lay(layout, place)
        self._take_memory()
        if master is not None:
            with torch.no_grad(), self.masters.opened(write=True) as own:
                own.copy_(master)
                self.masters.lend(own)
        entries = []
        for position, (entry, local) in enumerate(zip(self.entries, self._sliced_masters(), strict=True)):
            assert local is not None
            segment = self.segments[position]
            entry.sliced.grad = None
            entry.sliced.local = local
            slicing = entry.sliced.slicing
            entry.sliced.slicing = replace(slicing, start=segment.parameter_start, numel=segment.numel)
            whole, node = self._whole_parameter(position)
            vars(whole).update(vars(entry.whole))
            entries.append(replace(entry, whole=whole, node=node))
        self.entries = entries
        self._watch_writes()

    def _whole_parameter(self, position: int) -> tuple[nn.Parameter, object | None]:
        """What modules hold for a parameter while the unit computes, and the node where autograd puts its gradient."""
        whole = self.as_parameter(position, self._whole.views[position])
        if type(whole) is nn.Parameter:
            whole.__class__ = WholeParameter
        return whole, get_gradient_edge(whole).node if self.trainable else None

    def _sliced_masters(self) -> Sequence[Tensor | None]:
        """The part of every parameter in ``master``, 1-D; None where masters rest in a file."""
        master = self.masters.in_memory
        return [None] * len(self.layout.numels) if master is None else self.split(master)

    def _entry(self, position: int, found: FoundParameter, local: Tensor | None) -> Entry:
        segment = self.segments[position]
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
            found.name in self._whole_names,
        )
        if local is not None:
            own = SlicedTensor(local, slicing, on_write=self._write_begins)
        else:
            own = self.masters.resting(segment.slice_start, slicing, self._write_begins)
        shown = nn.Parameter(own, self.trainable)
        sliced: Tensor = shown
        assert isinstance(sliced, SlicedTensor)
        whole, node = self._whole_parameter(position)
        for attribute, value in vars(found.parameter).items():
            if attribute not in (*vars(sliced), "local"):
                setattr(sliced, attribute, value)
                setattr(whole, attribute, value)
        return Entry(found.name, found.places, sliced, shown, whole, node)

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

    def store(self, page: Page, source: Tensor) -> None:
        """Begin to write ``source``, which nobody changes any more, to a page where its masters rest."""
        assert self._stores is not None
        self._stores.outbox.store(page, source)

    def split(self, flat_slice: Tensor) -> list[Tensor]:
        """The part of every parameter in this rank's slice, 1-D."""
        return self._cut(flat_slice)

    def show_sliced(self) -> None:
        """Let modules hold the sliced parameters again.

        Raises:
            UsageError: if whole parameters were written to meanwhile, which would be lost.
        """
        for entry in self.entries:
            entry.put(entry.shown)
        if (writes := self._count_writes()) != self._writes:
            self._writes = writes
            raise UsageError(
                f"parameters of unit {self.unit!r} were written to while the unit computed. The change would be "
                "lost, because the parameters are sharded: edit them outside of forward, inside `with "
                "torch.no_grad(), onecopy.gathered(model, write=True):`."
            )

    def _count_writes(self) -> int:
        """Counts writes to the whole parameters. A DTensor counts its own, apart from the memory's."""
        return self._whole.views[0]._version + sum(whole._version for whole in self._dtensors)

    def show_whole(self) -> None:
        """Let modules hold the whole parameters; only while they are gathered."""
        assert self.state is State.WHOLE, f"unit {self.unit!r} is {self.state.value}"
        for entry in self.entries:
            # Others may freeze parameters for a while: a discriminator, adapters during a reference pass.
            if entry.whole.requires_grad is not (wanted := self.trainable and entry.shown.requires_grad):
                entry.whole.requires_grad_(wanted)
            entry.put(entry.whole)

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
                self.mesh.tensor.broadcast(part, self.unit, self.tag + Message.TENSOR)
        self.load_flat(flat)

    def load_flat(self, flat: Tensor) -> None:
        """As `load`, from a flat buffer in the master dtype."""
        self._write_begins()
        with torch.no_grad(), self.masters.opened(write=True) as master:
            own = master if master.device == flat.device else self._own_part(flat).clone()
            self.mesh.shard.scatter(flat, own, self.unit, self.tag + Message.LOAD, self.layout.ragged)
            for position, axis in enumerate(self.mesh.replicate):
                axis.broadcast(own, self.unit, self.tag + Message.COPY + position)
            if own is not master:
                master.copy_(own)
        self.masters.lend(master)

    @contextmanager
    def rewritten(self) -> Iterator[Tensor]:
        """This rank's slice, all of which is written to inside of the block."""
        self._write_begins()
        with torch.no_grad(), self.masters.opened(write=True) as master:
            yield master
            self.masters.lend(master)

    def gather_masters(self) -> FlatBuffer:
        """The whole parameters in the master dtype, gathered into a new buffer."""
        whole = self.buffer(self.dtypes.master)
        if collective := self._issue_gather(whole.flat, Message.MASTERS):
            collective.finish()
        return whole

    def equals_slice(self, flat: Tensor) -> bool:
        """Whether this rank's part of ``flat`` (master dtype) is bit for bit what its slice holds."""
        with self.masters.opened(write=False) as master:
            own = self._own_part(flat).to(master.device)
            return torch.equal(own.view(torch.uint8), master.view(torch.uint8))

    def __deepcopy__(self, memo: object) -> Bucket:
        """Itself: copies of slices, as checkpoints stage them, are slices of the same bucket."""
        return self

    def _write_begins(self) -> None:
        """The slices are about to change. A gathered copy is stale then, and so is any graph that was built with it."""
        if self.is_opened:
            raise UsageError(
                f"a parameter of unit {self.unit!r} is written to as a slice inside onecopy.gathered, where modules "
                "hold it whole: write to the module's attribute (model.layer.weight), or to the tensor that "
                "gathered gives."
            )
        self.changes += 1
        self.finish_gather()
        if self.before_write is not None:
            self.before_write()
        self.masters.write_begins()
        if self._whole.is_allocated and not self._aliased:
            self.state = State.SLICED
            # Whoever still holds the old values in a graph is told by autograd.
            increment_version([self._whole.views[0], *self._dtensors])
            self._writes = self._count_writes()
            self._poison()

    def refuse_changed(self) -> NoReturn:
        """Raise the error about a graph that was built with parameters that have changed since."""
        raise UsageError(
            f"the parameters of unit {self.unit!r} were changed between a forward and its backward (by an optimizer "
            "step?): run the backward before the change, or run the forward again after it."
        )

    def _own_part(self, flat: Tensor) -> Tensor:
        return self.layout.own_part(flat, self.mesh.shard.rank)

    # --- gather and release

    def lay_out(self, version: int) -> None:
        """Let other ranks fetch this rank's slice."""
        assert self.shelf is not None
        assert self.masters.lent is not None
        self._version = version
        self.shelf.lay(self.masters.lent, version)

    def clear_shelf(self) -> None:
        """No rank fetches any more."""
        assert self.shelf is not None
        self.shelf.clear()

    def start_gather(self, *, backward: bool) -> None:
        """Begin to make the parameters whole, unless they are or it has begun. Sends (N-1)/N of the bucket."""
        self.masters.await_lent()
        if self.state is not State.SLICED:
            return
        if self.device.type == "meta":
            raise UsageError(NO_MEMORY)
        if self._whole.allocate():
            self.meter.add("parameters_gathered", self._whole.nbytes)
            self._poison()
        self._gathering = self._issue_gather(self._whole.flat, Message.BACKWARD if backward else Message.FORWARD)
        self.state = State.WHOLE if self._gathering is None else State.GATHERING

    def _issue_gather(self, whole: Tensor, message: Message) -> Collective | Fetching | None:
        """Fill the flat ``whole``, in its dtype: from the shelves where ranks fetch, else by a collective."""
        axis, mine = self.mesh.shard, self.masters.lent
        if message is Message.MASTERS and self.masters.lends_copy:
            with self.masters.opened(write=False) as master:
                mine = self._own_part(whole).copy_(master)
        elif mine is None or mine.device.type != whole.device.type:
            return Fetching(self.masters, self._own_part(whole), partial(self._gather_together, whole, message))
        elif self.shelf is not None and self.shelf.laid is not None:
            return axis.gather(self.shelf, whole, self._version, self.unit, self.layout.ragged)
        elif whole.dtype != mine.dtype and axis.size > 1:
            mine = self._own_part(whole).copy_(mine)
        return axis.all_gather(mine, whole, self.unit, self.tag + message, self.layout.ragged)

    def _gather_together(self, whole: Tensor, message: Message) -> Collective | None:
        """As `_issue_gather`, once this rank's part of ``whole`` is there."""
        ragged = self.layout.ragged
        return self.mesh.shard.all_gather(self._own_part(whole), whole, self.unit, self.tag + message, ragged)

    def finish_gather(self) -> None:
        """Wait until a gather that was begun is complete."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            # Where it fails, what has come is not whole.
            self.state = State.SLICED
            gathering.finish()
            self.state = State.WHOLE

    def forget_whole(self) -> None:
        """Gather anew at the next use; a gather under way is given up, whose ranks may be gone."""
        self._gathering = None
        if not self._aliased:
            self.state = State.SLICED

    def _poison(self) -> None:
        if POISON and self._whole.flat.is_floating_point():
            self._whole.flat.fill_(torch.nan)

    def seal(self) -> None:
        """From now on whoever else comes to hold the whole parameters keeps them from being released."""
        self._holders = self._count_holders()

    def _count_holders(self) -> list[int]:
        # C++ and Python count apart: autograd's graph on one side, a module's attribute on the other.
        counts = [torch._C._storage_Use_Count(self.storage._cdata)]
        for entry in self.entries:
            whole: Any = entry.whole
            counts += (whole._use_count(), getrefcount(whole))
        return counts

    def release(self) -> None:
        """Give the memory of the whole parameters back, unless somebody else still holds them, or has made a numpy
        array of them: then it stays.

        Whether somebody does may differ between ranks (a backend's thread lets go of its tensors when it likes), and
        the next gather must not: it is made in any case, and fills in the values that are there.
        """
        if self._aliased or not self._whole.is_allocated:
            return
        self.finish_gather()
        self.state = State.SLICED
        if self._count_holders() != self._holders or not self.storage.resizable():
            return
        self._whole.free()
        self.meter.add("parameters_gathered", -self._whole.nbytes)

    def view(self, size: torch.Size, strides: tuple[int, ...], offset: int) -> Tensor:
        """A view of the whole parameters, which are gathered."""
        assert self.state is State.WHOLE, f"unit {self.unit!r} is {self.state.value}"
        return self._whole.flat.as_strided(size, strides, offset)

    def shows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at the whole parameters."""
        memory = self._whole.flat.untyped_storage().data_ptr()
        return memory != 0 and address_of(tensor) == memory

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameters in the compute dtype."""
        return self.layout.padded_numel * self.dtypes.compute.itemsize

    @property
    def is_fetchable(self) -> bool:
        """Whether other ranks could read what gathers read: it is a tensor on the device that computes."""
        stores = self._stores
        on_host = stores is not None and stores.parameters_on_host and self.device.type != "cpu"
        return stores is None or (stores.parameters is None and not on_host)

    @property
    def lent_dtype(self) -> torch.dtype:
        """The dtype of what gathers read."""
        return self.dtypes.compute if self.masters.lends_copy else self.dtypes.master

    @property
    def is_own_memory(self) -> bool:
        """Whether the whole parameters are other memory than the slices', which comes and goes."""
        return not self._aliased

    def check(self, *, trains: bool) -> None:
        """Raise `UsageError` if a parameter was replaced, hooked or (where a graph is built) unfrozen since `shard`.

        So it does if there is no memory yet.
        """
        if self.device.type == "meta":
            raise UsageError(NO_MEMORY)
        for entry in self.entries:
            if trains and entry.sliced.requires_grad and not self.trainable:
                raise UsageError(
                    f"requires_grad of {entry.name!r} was False when onecopy.shard was called and is True now: "
                    f"unfreeze parameters before sharding. (Freezing them afterwards is fine, also for a while.)"
                )
            if entry.sliced._backward_hooks or entry.sliced._post_accumulate_grad_hooks:
                raise UsageError(
                    f"parameter {entry.name!r} has gradient hooks, which do not run on sharded parameters: read "
                    f"p.grad after backward instead."
                )
            if any(module._parameters.get(attribute) is not entry.shown for module, attribute in entry.places):
                raise UsageError(
                    f"parameter {entry.name!r} was replaced after onecopy.shard; edit it in place inside "
                    f"`with torch.no_grad(), onecopy.gathered(model, write=True):` instead."
                )
