"""The ranks that save and load together, over a process group of their own.

A save in the background exchanges plans and results while the training's collectives run; on one group gloo would pair
them with each other. So checkpoints have their own, made at their first use and kept as long as the default one lives.
It has the default group's time limit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onecopy.checkpoint.messages import swap
from onecopy.comm.backends import serves_cpu, time_limit
from onecopy.comm.mesh import make_mesh
from onecopy.errors import CheckpointError, CollectiveError, OnecopyError
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger
from onecopy.untrusted import Refused, reason

T = TypeVar("T")

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


class Group:
    """All ranks of the default process group; this process alone where there is none.

    Attributes:
        handle: the process group, None for one rank.
        rank: this rank.
        size: all ranks.
        finish_background: waits for the save that is under way on this group.
    """

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self.handle = handle
        self.rank = handle.rank() if handle is not None else 0
        self.size = handle.size() if handle is not None else 1
        self.finish_background: Callable[[], object] = lambda: None

    @staticmethod
    def current() -> Group:
        """The group of the ranks that run now. Every rank must ask at its first use."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or world.size() == 1:
            return _alone
        group = _groups.get(world)
        if group is None:
            group = _groups[world] = Group(_make_group(world))
        return group

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, in order of ranks."""
        others = self._others()
        received = self._swap(dict.fromkeys(others, value), others)
        return [received.get(rank, value) for rank in range(self.size)]

    def scatter(self, values: list[T] | None) -> T:
        """This rank's of the values that the first rank gives."""
        if self.rank == 0:
            assert values is not None
            self._swap({rank: values[rank] for rank in self._others()}, ())
            return values[0]
        found: T = self._swap({}, [0])[0]
        return found

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on the first rank, None on others."""
        if self.rank:
            self._swap({0: value}, ())
            return None
        received = self._swap({}, self._others())
        return [received.get(rank, value) for rank in range(self.size)]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _swap(self, given: Mapping[int, Any], sources: Iterable[int]) -> dict[int, Any]:
        return swap(self.handle, given, sources) if self.handle is not None else {}

    def together(self, what: str, do: Callable[[], T]) -> list[T]:
        """Do something on every rank; what each returned, if it worked everywhere.

        Raises:
            CheckpointError: on every rank, with what went wrong on each that failed; or an error of onecopy's own of
                the first one's kind.
        """
        mine: tuple[T | None, Exception | None] = (None, None)
        try:
            mine = (do(), None)
        except Exception as error:
            mine = (None, error if isinstance(error, OnecopyError) else CheckpointError(_words(error)))
        results = self.exchange(mine)
        failed = {rank: error for rank, (_, error) in enumerate(results) if error is not None}
        if failed:
            words = sorted({str(error) for error in failed.values()})
            kind = type(next(iter(failed.values())))
            where = f" on rank {', '.join(map(str, failed))}" if len(failed) < self.size else ""
            raise kind(f"{what} failed{where}: {'; '.join(words)}")
        return [value for value, _ in results]  # type: ignore[misc]

    def on_first(self, what: str, do: Callable[[], T]) -> T:
        """Do something on the first rank; what it returned, on every rank. Errors as in `together`."""
        return self.together(what, lambda: do() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _make_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    # Making a group cannot say who is missing; this does.
    if serves_cpu(world):
        others = [rank for rank in range(world.size()) if rank != world.rank()]
        swap(world, dict.fromkeys(others), others)
    else:
        axis = make_mesh(None, shards=True, ledger=Ledger(), staging=Staging()).shard
        if meeting := axis.combine(torch.zeros(1, device=axis.control_device), "agree"):
            meeting.finish()
    try:
        handle = dist.new_group(backend="gloo", timeout=time_limit(world), group_desc="onecopy checkpoints")
    except RuntimeError as error:
        raise CollectiveError(f"the ranks could not connect to save or load a checkpoint: {reason(error)}") from error
    assert isinstance(handle, dist.ProcessGroup)
    return handle


_alone = Group(None)


def _words(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    return f"{type(error).__name__}: {str(error) if isinstance(error, OSError) else reason(error)}"
