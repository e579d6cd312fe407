"""Virtual gloo: process groups, and messages between virtual ranks over sockets.

A message is delivered once both sides have posted it, whatever they are doing: at once, or when somebody waits for it.
It is checked that neither side's memory changes in between. What waits for a rank that has died, or whose time was up
once, fails as it does with gloo.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from virtual_world import LIMIT, World, now


def bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def poison(tensor: Tensor) -> bytes:
    """Fill what has undefined content with NaN. Returns what it holds now."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    return bytes_of(tensor)


class Gloo:
    """What goes on between the ranks of one world.

    Args:
        eager: messages are delivered at once when both sides have posted them, else as late as possible.
        on_delivery: called with every message as it is delivered.
    """

    def __init__(self, world: World, *, eager: bool, on_delivery: Callable[[Send], None]) -> None:
        self.world = world
        self.eager = eager
        self.on_delivery = on_delivery
        self.channels: defaultdict[Any, _Channel] = defaultdict(_Channel)
        self.objects: dict[tuple[tuple[int, ...], int, int], object] = {}
        self.calls: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._groups: dict[tuple[int, tuple[int, ...]], Group] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """The running rank's end of a process group."""
        key = self.world.rank, tuple(ranks)
        return self._groups.setdefault(key, Group(*key))


class Group:
    """One rank's end of a process group."""

    _device_types: ClassVar = [torch.device("cpu")]

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._place = ranks.index(rank)

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Send:
        return Dist().isend(*tensors, group=self, group_dst=place, tag=tag)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        return Dist().irecv(*tensors, group=self, group_src=place, tag=tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return Dist().irecv(*tensors, group=self, tag=tag)

    def _get_backend(self, device: torch.device) -> Any:
        options = SimpleNamespace(_timeout=timedelta(seconds=LIMIT))
        return SimpleNamespace(name=lambda: "gloo", options=options)


class Mesh(DeviceMesh):
    """``shape`` is (replicas, shards)."""

    mesh_dim_names = ("replicate", "shard")
    device_type = "cpu"

    def __init__(self, gloo: Gloo, shape: tuple[int, int]) -> None:
        world = gloo.world
        self.sizes = shape
        ranks = torch.arange(world.size).view(shape)
        replica, shard = divmod(world.rank, shape[1])
        self._virtual = {
            "replicate": gloo.group(ranks[:, shard].tolist()),
            "shard": gloo.group(ranks[replica].tolist()),
        }

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        name = self.mesh_dim_names[mesh_dim] if isinstance(mesh_dim, int) else mesh_dim
        return self._virtual[name]  # type: ignore[index]


class _Channel:
    """Messages from one rank to another under one tag, in order."""

    def __init__(self) -> None:
        self.sent: deque[Send] = deque()
        self.wanted: deque[_Receive] = deque()

    def match(self, gloo: Gloo) -> None:
        while self.sent and self.wanted:
            send, receive = self.sent.popleft(), self.wanted.popleft()
            send.receive, receive.send = receive, send
            if gloo.eager:
                send.deliver()


class _Message:
    """What `isend` or `irecv` returns."""

    def __init__(self, gloo: Gloo, peer: int, what: str) -> None:
        self._gloo = gloo
        self._world = gloo.world
        self._peer = peer
        self._what = what
        self.rank = gloo.world.rank

    @property
    def _is_cut(self) -> bool:
        return bool(self._world.cut & {self._peer, self.rank}) or self._peer in self._world.dead

    def _wait(self, is_there: Callable[[], bool], timeout: timedelta | None) -> None:
        limit = LIMIT if timeout is None else timeout.total_seconds()
        if not self._world.wait(lambda: is_there() or self._is_cut, self._what, limit):
            # gloo closes all connections of whoever loses patience.
            self._world.cut.add(self.rank)
            raise RuntimeError(f"Timed out waiting {1000 * limit:.0f}ms for an operation to complete")
        if not is_there():
            raise RuntimeError("Connection closed by peer")


class Send(_Message):
    def __init__(self, gloo: Gloo, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(gloo, peer, f"rank {peer} to receive what is sent under tag {tag}")
        self.tensor = tensor
        self.snapshot = bytes_of(tensor)
        self.tag = tag
        self.receive: _Receive | None = None
        self.delivered = False

    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait(lambda: self.receive is not None, timeout)
        self.deliver()

    def deliver(self) -> None:
        assert self.receive is not None
        if not self.delivered:
            self.delivered = True
            self._gloo.on_delivery(self)
            if self._world.struck is None and bytes_of(self.tensor) != self.snapshot:
                raise self._world.race("a tensor changed while it was being sent")
            self.receive.arrive(self)


class _Receive(_Message):
    def __init__(self, gloo: Gloo, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(gloo, peer, f"rank {peer} to send under tag {tag}")
        self.tensor = tensor
        self.poison = poison(tensor)
        self.send: Send | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait(lambda: self.send is not None, timeout)
        assert self.send is not None
        self.send.deliver()

    def arrive(self, send: Send) -> None:
        if self._world.struck is None and bytes_of(self.tensor) != self.poison:
            raise self._world.race("memory was written to while a message was to arrive there")
        ctypes.memmove(self.tensor.data_ptr(), send.tensor.data_ptr(), send.tensor.nbytes)


class _ReceiveAny(_Message):
    """A message from whoever sends one."""

    def __init__(self, gloo: Gloo, tensor: Tensor, group: Group, tag: int) -> None:
        super().__init__(gloo, gloo.world.rank, f"anybody's message under tag {tag}")
        self._tensor = tensor
        self._channels = [gloo.channels[group.ranks, peer, self.rank, tag] for peer in group.ranks if peer != self.rank]

    def wait(self, timeout: timedelta | None = None) -> None:
        self._world.wait(lambda: any(channel.sent for channel in self._channels), self._what)
        able = [channel for channel in self._channels if channel.sent]
        send = able[self._world.choose_among(len(able))].sent.popleft()
        receive = _Receive(self._gloo, self._tensor, send.rank, 0)
        send.receive, receive.send = receive, send
        send.deliver()


class Dist:
    """What onecopy calls in `torch.distributed`."""

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=now.world.gloo.group(range(now.world.size)))

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def get_backend(self, group: Group) -> str:
        return "gloo"

    def get_backend_config(self, group: Group) -> str:
        return "cpu:gloo"

    def isend(self, tensor: Tensor, *, group: Group, group_dst: int, tag: int) -> Send:
        gloo, peer = now.world.gloo, group.ranks[group_dst]
        self._check(peer)
        channel = gloo.channels[group.ranks, now.world.rank, peer, tag]
        channel.sent.append(message := Send(gloo, tensor, peer, tag))
        channel.match(gloo)
        return message

    def irecv(self, tensor: Tensor, *, group: Group, group_src: int | None = None, tag: int) -> _Receive | _ReceiveAny:
        gloo = now.world.gloo
        if group_src is None:
            return _ReceiveAny(gloo, tensor, group, tag)
        peer = group.ranks[group_src]
        self._check(peer)
        channel = gloo.channels[group.ranks, peer, now.world.rank, tag]
        channel.wanted.append(message := _Receive(gloo, tensor, peer, tag))
        channel.match(gloo)
        return message

    def _check(self, peer: int) -> None:
        world = now.world
        world.give_way("post")
        if peer in world.dead or world.cut & {peer, world.rank}:
            raise RuntimeError("Connection closed by peer")

    def all_gather_objects(self, own: Any, group: Group, size: int, device: torch.device) -> list[Any]:
        world = now.world
        ranks = group.ranks
        objects_of, calls = world.gloo.objects, world.gloo.calls
        call = calls[ranks, world.rank]
        calls[ranks, world.rank] += 1
        objects_of[ranks, world.rank, call] = own

        def is_there() -> bool:
            return all((ranks, peer, call) in objects_of for peer in ranks)

        def is_cut() -> bool:
            return bool(world.cut & set(ranks)) or bool(world.dead & set(ranks))

        if not world.wait(lambda: is_there() or is_cut(), "objects of all ranks", LIMIT):
            world.cut.add(world.rank)
            raise RuntimeError("Timed out waiting for objects")
        if not is_there():
            raise RuntimeError("Connection closed by peer")
        return [objects_of[ranks, peer, call] for peer in ranks]
