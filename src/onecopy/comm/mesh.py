"""The mesh: ranks as shard × replicate (× tensor), and one `Axis` for each, through which all collectives go.

Plain ZeRO has shard = N and replicate = 1; stage 0 replicates over every axis; hybrid sharding (MiCS, HSDP) and
redundancy for recovery have both. The tensor axis belongs to the model (tensor parallelism): model states are neither
cut nor copied along it by onecopy, so it is not among `Mesh.axes`. Without a process group every axis has size 1 and
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.backends import (
    exchanges_directly,
    for_reduces,
    own_device,
    transport_for,
    with_control,
    with_neighbours,
)
from onecopy.comm.collective import Collective, Label, Program
from onecopy.comm.direct_exchange import point_to_point
from onecopy.comm.monitor import Monitor, monitor_of
from onecopy.comm.native_calls import NativeCalls
from onecopy.comm.objects import all_gather_objects
from onecopy.comm.outgoing import Outgoing
from onecopy.comm.patience import patience
from onecopy.comm.presence import leave, met, presence_of
from onecopy.comm.serving import server_of
from onecopy.comm.shelf import Shelf
from onecopy.comm.transport import Lengths, Peers, Transport
from onecopy.errors import CollectiveError, SettingsError
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger

T = TypeVar("T")

# A gloo message finds its receiver by tag. Ours start far above the small numbers that a user's own messages carry.
_TAG_BASE: Final = 1 << 24
_CONTROL_TAGS: Final = {
    "agree": _TAG_BASE - 1,
    "norm": _TAG_BASE - 2,
    "overflow": _TAG_BASE - 3,
    "barrier": _TAG_BASE - 5,
}
_ACTIVATIONS_TAG: Final = _TAG_BASE - 4
_SLICES_TAG: Final = 1 << 27
"""Of slices that go from rank to rank, in the order in which they are sent; below the answers' of `serving.py`."""

_ALSO_NAMED: Final = {
    "dp": "shard",
    "fsdp": "shard",
    "dp_shard": "shard",
    "ddp": "replicate",
    "dp_replicate": "replicate",
    "tp": "tensor",
}
"""What others call the axes."""


class Axis:
    """One axis of the mesh. Every method is a collective over it, booked in the ledger.

    An axis of size 1 sends nothing, and its collectives are done when they return.

    Attributes:
        name: "shard", "replicate" or "tensor".
        size: ranks on the axis.
        rank: this rank's place on it.
        ranks: the global rank at each place.
    """

    def __init__(
        self,
        name: str,
        peers: Peers | None,
        staging: Staging,
        ledger: Ledger,
        *,
        control: Peers | None = None,
        reducing: Peers | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.name = name
        self.size = peers.size if peers else 1
        self.rank = peers.rank if peers else 0
        self.ranks = peers.ranks if peers else (0,)
        self._peers = peers
        # The same ranks over a group that sends CPU tensors, and over one for reduces on a device.
        self._control = control
        self._reducing = reducing
        self._monitor = monitor
        self._staging = staging
        self._ledger = ledger
        self._transports: dict[torch.device, Transport] = {}

    def alone(self) -> Axis:
        """An axis of this name with this rank alone on it."""
        return Axis(self.name, None, self._staging, self._ledger)

    def reconnect(self, other: Axis) -> None:
        """Go on as ``other``, an axis of this name whose ranks have met anew."""
        assert self.name == other.name
        vars(self).update(vars(other))

    def exchange_slices(
        self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], op: str
    ) -> Collective:
        """Send contiguous CPU tensors to places and fill others from places, in the same order at both ends.

        Booked as ``op``. Nothing of it may change before it is done.
        """
        assert self._peers is not None
        program = point_to_point(self._control or self._peers, sent, received, _SLICES_TAG)
        nbytes = sum(tensor.nbytes for tensor, _ in sent)
        return Collective(program, Label(op, "", self.name), nbytes, self._ledger)

    def make_shelves(self, numbers: Sequence[int], uses: Sequence[int]) -> list[Shelf] | None:
        """A shelf for the CPU slices of each numbered bucket, fetched so often from each version; a collective call.

        None where slices are gathered by collectives: on other backends than gloo, and on an axis of one rank.
        """
        if self._peers is None or not exchanges_directly(self._peers.group):
            return None
        server = server_of(self._peers)
        presence = presence_of(self._peers, server)
        shelves = [
            Shelf(self._peers, number, server, presence, often) for number, often in zip(numbers, uses, strict=True)
        ]
        addresses = self.exchange_objects([shelf.address for shelf in shelves])
        for shelf, found in zip(shelves, zip(*addresses, strict=True), strict=True):
            shelf.connect(found)
        return shelves

    def gather(self, shelf: Shelf, whole: Tensor, version: int, unit: str, lengths: Lengths = None) -> Collective:
        """Fill the flat ``whole`` with every rank's slice of ``version``, without the other ranks' doing.

        Booked like `all_gather`: this rank's slice to each other one, as it is sent where all ranks gather alike.
        """
        program = shelf.gather(whole, version, lengths)
        return self._issue(program, "all_gather", unit, self._fraction(whole, lengths), on=whole)

    def all_gather(
        self, mine: Tensor, whole: Tensor, unit: str, tag: int, lengths: Lengths = None
    ) -> Collective | None:
        """Fill the flat ``whole`` with every rank's slice, ``mine``. Sends (N-1)/N of it. None: nothing to do.

        Args:
            lengths: elements of each slice, by place, where they differ. A rank then sends its own to each other one.
        """
        return self._gather("all_gather", mine, whole, unit, _TAG_BASE + tag, lengths)

    def barrier(self) -> None:
        """Wait until every rank of the axis has come here; a control message."""
        if message := self.combine(torch.zeros(1, device=self.control_device), "barrier"):
            message.finish()

    def gather_activation(self, mine: Tensor, whole: Tensor, unit: str) -> None:
        """As `all_gather`, of an activation checkpoint of ``unit``; done, and ``mine`` free, when it returns."""
        if collective := self._gather("activations", mine, whole, unit, _ACTIVATIONS_TAG):
            collective.finish()

    def _gather(
        self, op: str, mine: Tensor, whole: Tensor, unit: str, tag: int, lengths: Lengths = None
    ) -> Collective | None:
        if self._peers is None:
            whole.copy_(mine)
            return None
        program = self._transport(whole).all_gather(self._peers_for(whole), mine, whole, tag, lengths)
        return self._issue(program, op, unit, self._fraction(whole, lengths), on=whole)

    def reduce_scatter(
        self, outgoing: Outgoing, out: Tensor, unit: str, tag: int, lengths: Lengths = None
    ) -> Collective | None:
        """Set ``out`` to the mean of this rank's slice of ``outgoing``. Sends (N-1)/N of it.

        Args:
            lengths: as in `all_gather`. A rank then sends all but its own slice.
        """
        if self._peers is None:
            outgoing.copy_to(out, 0)
            outgoing.close()
            return None
        peers, tag = self._peers_to_reduce(out), _TAG_BASE + tag
        program = self._transport(out).reduce_scatter(peers, outgoing, out, tag, lengths)
        sent = self._share(outgoing)
        if lengths is not None:
            sent = (outgoing.numel - lengths[self.rank]) * outgoing.dtype.itemsize
        return self._issue(program, "reduce_scatter", unit, sent, on=out)

    def all_reduce(self, outgoing: Outgoing, out: Tensor, unit: str, tag: int) -> Collective | None:
        """Set ``out`` to the mean of ``outgoing``, which may be it. Sends 2(N-1)/N of it."""
        if self._peers is None:
            return None
        program = self._transport(out).all_reduce(self._peers_to_reduce(out), outgoing, out, _TAG_BASE + tag)
        return self._issue(program, "all_reduce", unit, 2 * self._share(outgoing), on=out)

    def scatter(self, whole: Tensor, out: Tensor, unit: str, tag: int, lengths: Lengths = None) -> None:
        """Set ``out`` to this rank's slice of the first rank's ``whole``, which other ranks' ``whole`` may become."""
        if self._peers is None:
            out.copy_(whole)
            return
        program = self._transport(whole).scatter(self._peers_for(whole), whole, out, _TAG_BASE + tag, lengths)
        own = whole.nbytes // self.size if lengths is None else lengths[0] * whole.itemsize
        sent = whole.nbytes - own if self.rank == 0 else 0
        self._issue(program, "broadcast", unit, sent, on=out).finish()

    def broadcast(self, values: Tensor, unit: str, tag: int) -> None:
        """Replace the flat ``values`` by the first rank's."""
        if self._peers is None:
            return
        program = self._transport(values).broadcast(self._peers_for(values), values, _TAG_BASE + tag)
        sent = values.nbytes * self._transport(values).broadcast_copies(self.size) if self.rank == 0 else 0
        self._issue(program, "broadcast", unit, sent, on=values).finish()

    def combine(self, values: Tensor, op: str, *, maximum: bool = False) -> Collective | None:
        """Replace a handful of ``values`` (1-D) by their sum or maximum over the axis; a control message."""
        if self._peers is None:
            return None
        met(self.ranks)
        program = self._transport(values).combine(self._peers_for(values), values, maximum, _CONTROL_TAGS[op])
        return self._issue(program, op, "", values.nbytes * (self.size - 1), on=values)

    def exchange_objects(self, own: T) -> list[T]:
        """Every rank's picklable object, in order of places. For messages to people, not for training."""
        if self._peers is None:
            return [own]
        try:
            with patience(lambda _: f"exchange of settings over the {self.name} axis", None, may_be_in_vain=True):
                group = (self._control or self._peers).group
                return all_gather_objects(own, group, self.size, self.control_device)
        except RuntimeError as error:
            raise CollectiveError(
                f"exchange of settings over the {self.name} axis failed: a rank among {self.ranks} has most likely "
                f"ended; its own output says why."
            ) from error

    def queues_on(self, device: torch.device) -> bool:
        """Whether the backend itself carries out collectives of ``device``, in the order in which they are issued."""
        if self._peers is None or device.type == "meta":
            return False
        return isinstance(self._transport_on(device), NativeCalls)

    @property
    def control_device(self) -> torch.device:
        """Where a control message that belongs to no parameter is to be made."""
        if self._peers is None or self._control is not None:
            return torch.device("cpu")
        return own_device(self._peers.group)

    def _peers_for(self, tensor: Tensor) -> Peers:
        return self._peers_on(tensor.device)

    def _peers_on(self, device: torch.device) -> Peers:
        assert self._peers is not None
        return self._control if device.type == "cpu" and self._control is not None else self._peers

    def _peers_to_reduce(self, tensor: Tensor) -> Peers:
        return self._peers_for(tensor) if tensor.is_cpu or self._reducing is None else self._reducing

    def _transport(self, tensor: Tensor) -> Transport:
        return self._transport_on(tensor.device)

    def _transport_on(self, device: torch.device) -> Transport:
        transport = self._transports.get(device)
        if transport is None:
            transport = transport_for(self._peers_on(device).group, device, self._staging)
            self._transports[device] = transport
        return transport

    def _fraction(self, whole: Tensor, lengths: Lengths = None) -> int:
        own = whole.nbytes // self.size if lengths is None else lengths[self.rank] * whole.itemsize
        return own * (self.size - 1)

    def _share(self, outgoing: Outgoing) -> int:
        return outgoing.numel // self.size * (self.size - 1) * outgoing.dtype.itemsize

    def _issue(self, program: Program, op: str, unit: str, sent: int, *, on: Tensor) -> Collective:
        monitor = None if on.is_cpu else self._monitor
        return Collective(program, Label(op, unit, self.name), sent, self._ledger, monitor)


@dataclass(frozen=True)
class Mesh:
    """The axes that one sharded model uses.

    Attributes:
        shard: slices of a bucket lie along it.
        replicate: every axis along which the same slice is held again.
        tensor: ranks that compute parts of the same model on the same data; of size 1 without tensor parallelism.
    """

    shard: Axis
    replicate: tuple[Axis, ...]
    tensor: Axis

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes."""
        return (self.shard, *self.replicate)

    @property
    def control_device(self) -> torch.device:
        """Where control messages that belong to no parameter are to be made."""
        return next((axis.control_device for axis in self.axes if axis.size > 1), torch.device("cpu"))

    @property
    def size(self) -> int:
        """Ranks in the data-parallel axes."""
        return self.shard.size * self.copies

    @property
    def copies(self) -> int:
        """How many ranks hold the same slice."""
        product = 1
        for axis in self.replicate:
            product *= axis.size
        return product

    def reconnect(self, mesh: DeviceMesh | None) -> None:
        """Let the axes lead to the same places over new groups, whose ranks all call it.

        Args:
            mesh: as for `make_mesh`.
        """
        own = self.shard
        fresh = make_mesh(mesh, shards=len(self.replicate) == 1, ledger=own._ledger, staging=own._staging)
        for axis, other in zip(self.axes, fresh.axes, strict=True):
            axis.reconnect(other)

    def all_ranks(self) -> Axis:
        """An axis of all ranks of the default process group; a collective call."""
        own = self.shard
        if not dist.is_initialized() or own.size == dist.get_world_size():
            return own
        return _make_axis("world", dist.group.WORLD, own._staging, own._ledger)


def make_mesh(
    mesh: DeviceMesh | None,
    *,
    shards: bool,
    ledger: Ledger,
    staging: Staging,
    tensor: DeviceMesh | None = None,
) -> Mesh:
    """The mesh of a model.

    Args:
        mesh: axes named "shard", "replicate" and "tensor", any of them, or as others name them (`_ALSO_NAMED`); the
            only axis of a mesh without names is "shard". None takes all ranks as "shard".
        shards: False replicates over every axis (stage 0).
        ledger: where its collectives are booked.
        staging: communication buffers.
        tensor: the axis over which parameters are DTensors, None if there are none.

    Raises:
        SettingsError: if ``mesh`` has an axis of another name, or the tensor axis runs along a data-parallel one.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    if mesh is not None:
        groups = {name: mesh.get_group(place) for place, name in enumerate(_name_axes(mesh))}
    elif dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        groups = {"shard": dist.group.WORLD}
    if tensor is not None:
        _check_tensor_axis(groups, tensor)
        groups["tensor"] = tensor.get_group()

    def axis(name: str) -> Axis:
        return _make_axis(name, groups.get(name), staging, ledger)

    if shards:
        return Mesh(axis("shard"), (axis("replicate"),), axis("tensor"))
    return Mesh(Axis("shard", None, staging, ledger), (axis("shard"), axis("replicate")), axis("tensor"))


def _make_axis(name: str, group: dist.ProcessGroup | None, staging: Staging, ledger: Ledger) -> Axis:
    if group is None or group.size() == 1:
        return Axis(name, None, staging, ledger)
    peers = Peers(group, group.rank(), tuple(dist.get_process_group_ranks(group)))
    alone = Axis(name, peers, staging, ledger)

    def exchange(own: object) -> list[object]:
        # An exchange of objects cannot say who is missing; this does.
        if message := alone.combine(torch.zeros(1), "agree"):
            message.finish()
        return alone.exchange_objects(own)

    peers = with_neighbours(peers, exchange)
    control, reducing = with_control(peers), for_reduces(peers)
    return Axis(name, peers, staging, ledger, control=control, reducing=reducing, monitor=monitor_of(peers))


def forget(group: dist.ProcessGroup) -> None:
    """Nobody meets on ``group`` any more, and some of its ranks may be gone: owe them nothing."""
    leave(group)


def _name_axes(mesh: DeviceMesh) -> list[str]:
    found = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else ())
    names = [_ALSO_NAMED.get(name, name) for name in found]
    if not names or set(names) - {"shard", "replicate", "tensor"} or len(set(names)) < len(names):
        raise SettingsError(
            f'mesh must have axes named "shard", "replicate" or "tensor", each once ({", ".join(_ALSO_NAMED)} are '
            f"understood too); found {found or 'no names'}. Make it with init_device_mesh(device_type, sizes, "
            f'mesh_dim_names=("replicate", "shard")).'
        )
    return names


def _check_tensor_axis(groups: Mapping[str, dist.ProcessGroup], tensor: DeviceMesh) -> None:
    """Ranks that hold parts of one tensor must not have their gradients averaged with each other."""
    along = dist.get_process_group_ranks(tensor.get_group())
    for name, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        if name == "tensor" and ranks != along:
            raise SettingsError(f'parameters are DTensors over ranks {along}, but mesh["tensor"] has {ranks}.')
        if name != "tensor" and len(set(ranks) & set(along)) > 1:
            raise SettingsError(
                f"parameters are DTensors over ranks {along}, which are also on the {name} axis {ranks}. Make one "
                f'mesh, init_device_mesh(device_type, sizes, mesh_dim_names=("shard", "tensor")), parallelise the '
                f'model over mesh["tensor"] and pass onecopy.shard(..., mesh=mesh).'
            )
