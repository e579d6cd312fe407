"""Meeting: the process groups of one generation, made and left again. `join` is what users call.

A rank that dies inside a rendezvous leaves waits that nothing can cut, and what a failed rendezvous leaves behind makes
the next one under the same names impossible. So ranks first come together in the launcher's store, where a wait ends
with the next generation; only when all are there they rendezvous, within seconds; and whoever fails asks for a new
generation, with new names. A newcomer whose script runs from the top meets nobody yet: until `Run.loop` its process
group is torch's "fake" one, in which its collectives do nothing.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch.distributed.distributed_c10d._set_pg_timeout` and `._world.group_count`, which a failed
`init_process_group` leaves raised; `torch.testing._internal.distributed.fake_pg.FakeStore`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from onecopy.comm.device_meshes import device_mesh
from onecopy.comm.mesh import forget
from onecopy.errors import SettingsError
from onecopy.resilience.membership import Generation, Membership, membership
from onecopy.resilience.points import reach

RENDEZVOUS: Final = timedelta(seconds=3)
"""How long gloo may take to connect ranks that are all there."""

Shape = tuple[str, Sequence[int], Sequence[str]]
"""A mesh as `device_mesh` makes it: the type of device, sizes and names of its axes."""

_limit: list[timedelta] = []
_backend: list[str] = []
_excepthook = sys.excepthook


def join(timeout: float = 300.0) -> None:
    """Join the ranks of the job, in place of `torch.distributed.init_process_group`.

    Under `onecopy run` a spare waits in here until it is needed, and ranks can be replaced from here on. Under torchrun
    it initialises the default process group; without either there is one rank.

    Args:
        timeout: seconds that a collective may take.

    Raises:
        RuntimeError: if a rank ends before training has begun.
    """
    limit = timedelta(seconds=timeout)
    device = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(device or torch.device("cpu"))
    _limit[:], _backend[:] = [limit], [backend]
    member = membership()
    if member is None:
        if "RANK" in os.environ and not dist.is_initialized():
            _choose_device()
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = store_of_torchrun(limit)
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        return
    generation = member.await_place()
    members = generation.members
    if member.process not in members:
        # It is to make them more, once its script has come to its loop.
        members = (*members, member.process)
    rank = members.index(member.process)
    _tell_place(rank, len(members))
    os.environ["LOCAL_RANK"] = str(rank % int(os.environ["LOCAL_WORLD_SIZE"]))
    _choose_device()
    if generation.fresh:
        member.now = generation
        if not member.come(generation):
            raise RuntimeError("a rank has ended before training began")
        _initialize(member, generation)
        finish(member)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=len(members), store=FakeStore())


def _tell_place(rank: int, ranks: int) -> None:
    """What torchrun would tell, as it is now. Their number changes on one host alone."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}


def store_of_torchrun(limit: timedelta) -> Any:
    """Where ranks that torchrun, or somebody with its variables, has started find each other."""
    address, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    # torchrun's agent keeps one store for all attempts of a job, and with it the addresses of ranks that have ended.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = os.environ["RANK"] == "0"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, int(port), int(size), is_master=first and not agents, timeout=limit
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


def _choose_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))


def leave() -> None:
    """Give up the process groups that there are; local."""
    member = membership()
    if member is not None:
        member.cutter.leave()
    if dist.is_initialized():
        for group in list(_world.pg_map):
            forget(group)
        dist.destroy_process_group()


def shape_among(shape: Shape | None, ranks: int) -> Shape | None:
    """A mesh like ``shape`` of so many ranks: slices become more or fewer, and each has as many holders.

    Raises:
        SettingsError: if that is no whole number of slices.
    """
    if shape is None:
        return None
    device, sizes, names = shape
    shards = list(names).index("shard")
    copies = math.prod(sizes) // sizes[shards]
    if ranks % copies:
        raise SettingsError(f"{ranks} ranks cannot hold each slice {copies} times")
    return device, [ranks // copies if axis == shards else size for axis, size in enumerate(sizes)], names


def meet(shape: Callable[[int], Shape | None]) -> DeviceMesh | None:
    """Leave, and meet the ranks of the newest generation, again and again until it works.

    Args:
        shape: for a number of ranks, of the mesh whose groups are to be made too.

    Returns:
        That mesh.
    """
    member = membership()
    assert member is not None
    while True:
        leave()
        generation = member.await_next()
        wanted = shape(len(generation.members))
        reach("meeting")
        try:
            if not member.come(generation):
                continue
            _initialize(member, generation)
            mesh = None if wanted is None else device_mesh(*wanted, RENDEZVOUS)
        except RuntimeError:
            member.ask(generation.number)
            continue
        finish(member)
        _tell_place(dist.get_rank(), dist.get_world_size())
        reach("met")
        return mesh


def _initialize(member: Membership, generation: Generation) -> None:
    member.cutter.meeting_begins()
    # Connected within the meeting, for a wait in it to be cut like the others.
    store: Any = dist.PrefixStore(f"groups-{generation.number}", member.connect())  # type: ignore[attr-defined]
    if member.newest > generation.number:
        raise RuntimeError("there is a newer generation")
    # What a failed one has left; names of groups are made of it.
    _world.group_count = 0
    # Every call sets a hook that calls the one before.
    sys.excepthook = _excepthook
    rank = generation.members.index(member.process)
    dist.init_process_group(_backend[0], store=store, rank=rank, world_size=len(generation.members), timeout=RENDEZVOUS)


def finish(member: Membership) -> None:
    """All groups are made: they get the time limit that users asked for, and can be cut."""
    groups = list(_world.pg_map)
    for group in groups:
        _set_pg_timeout(_limit[0], group)
    member.cutter.meeting_ends(groups)
    if member.now is not None and member.newest > member.now.number:
        # It came while the meeting ended, and may have cut too little.
        member.cutter.cut()


def limit() -> timedelta:
    """How long a collective may take."""
    return _limit[0] if _limit else timedelta(seconds=300)
