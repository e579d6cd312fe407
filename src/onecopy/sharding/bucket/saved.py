"""SavedWeights: autograd keeps handles of whole parameters for backward, and not their memory.

Where parameters are released between forward and backward (stage 3), what autograd saves of them is a handle: which
bucket, and which view of it. Whatever route backward takes to a weight, the handle gathers the bucket and gives the
view back, so nothing reads memory that is not whole. All other tensors are kept as autograd keeps them; where the user
has hooks of their own in force (an activation checkpoint, `save_on_cpu`), those get them.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch._C._autograd._{top,push,pop}_saved_tensors_default_hooks`, `UntypedStorage._cdata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from onecopy.comm.dtensors import dtensor_from, is_dtensor, local_of
from onecopy.sharding.bucket.bucket import Bucket

_Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Handle(NamedTuple):
    """A view of a bucket's whole parameters, as autograd saved it.

    Attributes:
        bucket: whose memory it looks at.
        changes: the bucket's count of writes at that time.
        view: size, strides and offset, in elements.
        placed: what makes a DTensor of it again; None if it was none.
    """

    bucket: Bucket
    changes: int
    view: tuple[torch.Size, tuple[int, ...], int]
    placed: tuple[Any, ...] | None


class _Kept(NamedTuple):
    """Any other tensor, and its version when it was saved: autograd does not look for changes where hooks save."""

    tensor: Tensor
    version: int


class SavedWeights:
    """See the file's first lines.

    Args:
        buckets: those that are released.
        gather: makes one whole.
    """

    def __init__(self, buckets: Iterable[Bucket], gather: Callable[[Bucket], None]) -> None:
        self._gather = gather
        self._buckets = {bucket.storage._cdata: bucket for bucket in buckets}
        self._has_dtensors = any(any(bucket.specs) for bucket in self._buckets.values())

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def enter(self) -> Hooks | None:
        """Put the hooks in force; whoever called leaves them. None: they are in force already."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and isinstance(owner := getattr(top[0], "__self__", None), Hooks) and owner.saved is self:
            return None
        hooks = Hooks(self, top)
        torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
        return hooks

    def find(self, tensor: Tensor) -> _Handle | None:
        """The handle of a view of whole parameters; None for any other tensor."""
        placed = None
        local = tensor
        if self._has_dtensors and is_dtensor(tensor):
            wrapped: Any = tensor
            local = local_of(tensor)
            placed = (wrapped.device_mesh, wrapped.placements, wrapped.shape, wrapped.stride())
        try:
            bucket = self._buckets.get(local.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # of no storage, as sparse ones are
            return None
        if bucket is None or local.dtype != bucket.dtypes.compute:
            return None
        return _Handle(bucket, bucket.changes, (local.size(), local.stride(), int(local.storage_offset())), placed)

    def restore(self, handle: _Handle) -> Tensor:
        """The view, gathered.

        Raises:
            UsageError: if the parameters have been written to since it was saved.
        """
        if handle.changes != handle.bucket.changes:
            handle.bucket.refuse_changed()
        self._gather(handle.bucket)
        view = handle.bucket.view(*handle.view)
        return view if handle.placed is None else dtensor_from(view, *handle.placed)


class Hooks:
    """What is in force inside of a forward.

    Args:
        saved: whose handles they are.
        outer: the hooks that were in force before, which get what is no parameter.
    """

    def __init__(self, saved: SavedWeights, outer: _Pair | None) -> None:
        self.saved: Final = saved
        self._outer = outer
        self._pack: Callable[[Tensor], Any] = outer[0] if outer else _keep
        self._unpack: Callable[[Any], Tensor] = outer[1] if outer else _give_back

    def leave(self) -> None:
        """The forward is over, or was interrupted: put in force what was before."""
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None and top != self._outer:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: Tensor) -> Any:
        return self.saved.find(tensor) or self._pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.saved.restore(packed) if type(packed) is _Handle else self._unpack(packed)


def _keep(tensor: Tensor) -> _Kept:
    # An operation's own output would otherwise hold the operation that holds it.
    return _Kept(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def _give_back(kept: _Kept) -> Tensor:
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(kept.tensor.shape)} is at version {kept.tensor._version}, expected was version "
            f"{kept.version}. Write x = x + y in place of x += y there."
        )
    return kept.tensor
