"""The ranks that save and load together, over a process group of their own.

A save in the background exchanges plans and results while the training's collectives run; on one group gloo would pair
them with each other. So checkpoints have their own, made at their first use and kept as long as the default one lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from onecopy.errors import CheckpointError, CollectiveError, OnecopyError
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
            handle = dist.new_group(backend="gloo", group_desc="onecopy checkpoints")
            assert isinstance(handle, dist.ProcessGroup)
            group = _groups[world] = Group(handle)
        return group

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, in order of ranks."""
        if self.handle is None:
            return [value]
        values: list[T] = [value] * self.size
        self._guarded(lambda: dist.all_gather_object(values, value, group=self.handle))
        return values

    def scatter(self, values: list[T] | None) -> T:
        """This rank's of the values that the first rank gives."""
        if self.handle is None:
            assert values is not None
            return values[0]
        out: list[T | None] = [None]
        self._guarded(
            lambda: dist.scatter_object_list(out, values if self.rank == 0 else None, group=self.handle, group_src=0)
        )
        return out[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on the first rank, None on others."""
        if self.handle is None:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        self._guarded(lambda: dist.gather_object(value, values, group=self.handle, group_dst=0))
        return values

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

    def _guarded(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} lost another rank while a checkpoint was saved or loaded; that rank's own output "
                f"says why. Checkpoints saved before are untouched."
            ) from error


_alone = Group(None)


def _words(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    return f"{type(error).__name__}: {str(error) if isinstance(error, OSError) else reason(error)}"
