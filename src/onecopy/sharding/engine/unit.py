"""Unit: a module scope whose parameters are gathered and released as one, and the forwards that run through it."""

from __future__ import annotations

import weakref
from collections.abc import MutableSet, Sequence
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor, nn

from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.bucket.gradients import Gradients
from onecopy.sharding.bucket.saved import Hooks
from onecopy.sharding.graph.tensors import Edits


class RecordedForward:
    """One forward of a unit that autograd recorded. It lives as long as the graph of that forward does.

    Attributes:
        changes: state of the unit's parameters at the time of the forward.
        marked: the forward had inputs that require a gradient, so that the end of its backward can be seen.
        began: its backward has begun.
        ended: its backward has run through the whole unit.
        ran: a backward before this one has run through it, of a graph that was retained.
        time: `perf_counter()` when its forward, and then its backward, began; for a profile.
    """

    __slots__ = ("__weakref__", "began", "changes", "ended", "marked", "ran", "time")

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.time = 0.0
        self.marked = False
        self.began = False
        self.ended = False
        self.ran = False


@dataclass
class RunningForward:
    """A forward of a unit that is running now.

    Attributes:
        forward: None where autograd records nothing.
        recomputes: it runs inside a backward, for an activation checkpoint.
        autocast_cache: whether autocast kept cast weights before it began.
        caller: the frame that runs it.
        handled: the exception that its caller was handling, None as a rule; any other is the forward's own.
        edits: tensors replaced in its arguments until it ends.
        hooks: what decides how autograd keeps tensors, put in force for this forward; None if they were already.
    """

    forward: RecordedForward | None
    recomputes: bool
    autocast_cache: bool
    caller: FrameType | None
    handled: BaseException | None
    edits: Edits = field(default_factory=Edits)
    hooks: Hooks | None = None


class Unit:
    """See the file's first line.

    Args:
        name: fully qualified name of the scope; "" is the root.
        scope: the module whose forward needs the parameters.
        buckets: the parameters below ``scope`` that no unit further down has.

    Attributes:
        gradients: those of its trainable buckets.
        forwards: recorded forwards whose backward may come: those whose graphs are alive, or with `remember_forwards`
            all since parameters last changed.
        entered: those among them whose backward has begun in the backward that runs now.
        unrecorded: forwards without a graph inside a recorded forward of the model: reentrant activation checkpoints,
            which will record them when they recompute.
        running: forwards that are running now; more than one when the unit calls itself.
        finished: this backward has nothing more to do here.
    """

    def __init__(self, name: str, scope: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.name = name
        self.scope = scope
        self.buckets = tuple(buckets)
        self.gradients: tuple[Gradients, ...] = ()
        self.forwards: MutableSet[RecordedForward] = weakref.WeakSet()
        self.entered: list[RecordedForward] = []
        self.unrecorded = 0
        self.running: list[RunningForward] = []
        self.finished = False
        self._shows_whole = False

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {sum(len(b.entries) for b in self.buckets)} parameters)"

    @property
    def changes(self) -> int:
        """Counts writes to the parameters."""
        return sum(bucket.changes for bucket in self.buckets)

    @property
    def whole_bytes(self) -> int:
        """Bytes of its whole parameters."""
        return sum(bucket.whole_bytes for bucket in self.buckets)

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs through the unit now."""
        return bool(self.running) or not all(forward.ended for forward in self.entered)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward is left whose backward has not run."""
        if self.runs_again:
            return True
        changes = self.changes
        return self.unrecorded > 0 or any(f.changes == changes and not f.ended for f in self.forwards)

    @property
    def may_come(self) -> bool:
        """Whether backward may come here through a forward of an earlier pass."""
        changes = self.changes
        return self.unrecorded > 0 or any(forward.changes == changes for forward in self.forwards)

    @property
    def runs_again(self) -> bool:
        """Whether the backward that runs now has entered a retained graph, of which nobody knows what else comes."""
        return any(forward.ran for forward in self.entered)

    @property
    def all_arrived(self) -> bool:
        """Whether this backward has computed every gradient of the unit."""
        return all(g.all_arrived for g in self.gradients)

    def rebuild_gradients(self) -> None:
        """Start from no gradients; to be called when the buckets have new parameters."""
        self.gradients = tuple(Gradients(bucket) for bucket in self.buckets if bucket.trainable)

    def remember_forwards(self) -> None:
        """Let no decision depend on when a graph is freed, which may be another moment on each rank.

        Where ranks gather by collectives they must send and gather in one order, and Python's garbage collector frees
        a dropped graph that is part of a cycle when it likes.
        """
        if not isinstance(self.forwards, set):
            self.forwards = set(self.forwards)

    def record_forward(self) -> RecordedForward:
        forward = RecordedForward(self.changes)
        if isinstance(self.forwards, set):
            # Backward cannot come through forwards with parameters that have changed since.
            self.forwards = {other for other in self.forwards if other.changes == forward.changes}
        self.forwards.add(forward)
        return forward

    def enter(self, forward: RecordedForward) -> None:
        """The backward of ``forward`` begins."""
        forward.began = True
        self.entered.append(forward)

    def exit(self, forward: RecordedForward) -> None:
        """The backward of ``forward`` has run. Of outputs that no hook could watch, nobody saw it begin."""
        if not forward.began:
            self.enter(forward)
        forward.ended = True

    def leave(self) -> None:
        """The backward that ran is over. A graph that was retained may run backward again."""
        for forward in self.entered:
            forward.began = forward.ended = False
            forward.ran = True
            if isinstance(self.forwards, set):
                self.forwards.discard(forward)
        self.entered.clear()
        self.finished = False
        self.unrecorded = 0

    def check_unchanged(self, forward: RecordedForward) -> None:
        """Raise `UsageError` if the parameters changed between a forward and its backward."""
        if forward.changes != self.changes:
            self.buckets[0].refuse_changed()

    def start_gather(self, *, backward: bool = False) -> None:
        for bucket in self.buckets:
            bucket.start_gather(backward=backward)

    def finish_gather(self) -> None:
        for bucket in self.buckets:
            bucket.finish_gather()

    def release(self, *, frozen: bool = True) -> None:
        """Give whole parameters back; with ``frozen`` False only those that an optimizer changes."""
        for bucket in self.buckets:
            if frozen or bucket.trainable:
                bucket.release()

    def show_whole(self) -> None:
        """Let modules hold the whole parameters; only while they are gathered."""
        self._shows_whole = True
        for bucket in self.buckets:
            bucket.show_whole()

    def show_sliced(self) -> None:
        """Let modules hold the sliced parameters again, if they do not."""
        if self._shows_whole:
            self._shows_whole = False
            for bucket in self.buckets:
                bucket.show_sliced()

    def shows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at the unit's whole parameters."""
        return any(bucket.shows(tensor) for bucket in self.buckets)
