"""Computing inside `onecopy.gathered`: modules hold masters there, but compute in the dtype that training computes in.

While a module of the model is called, all modules hold copies in the compute dtype, and floating-point inputs are cast
as they are in training; between two calls modules hold the masters, to be read, saved and edited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onecopy.errors import UsageError
from onecopy.sharding.bucket.bucket import Bucket, Entry
from onecopy.sharding.bucket.flat import FlatBuffer
from onecopy.sharding.graph.compiled import untraced
from onecopy.sharding.graph.tensors import Edits, replace_tensors


class Copies:
    """A bucket's whole parameters in the compute dtype.

    Args:
        bucket: the bucket.
        masters: its whole parameters in the master dtype.
        shown: the parameters that modules hold whole, each with its entry.
        refuse: called with a gradient's parameter, when one arrives.
    """

    def __init__(
        self,
        bucket: Bucket,
        masters: FlatBuffer,
        shown: Sequence[tuple[Entry, nn.Parameter]],
        refuse: Callable[[Tensor], None],
    ) -> None:
        self._bucket = bucket
        self._masters = masters
        self._shown = shown
        self._refuse = refuse
        self._copy: FlatBuffer | None = None
        self._narrow: list[nn.Parameter] = []
        self._version = 0

    def show(self, *, renew: bool) -> None:
        """Let modules hold the copies, made at the first call, and at every one if masters may have been written to."""
        renew = renew or self._copy is None
        if self._copy is None:
            with torch.inference_mode(False):
                self._copy = self._bucket.buffer(self._bucket.dtypes.compute)
                self._narrow = [self._parameter(self._copy, entry) for entry, _ in self._shown]
        if renew:
            self._copy.flat.copy_(self._masters.flat)
        self._version = self._copy.views[0]._version
        for (entry, _), narrow in zip(self._shown, self._narrow, strict=True):
            entry.put(narrow)

    def _parameter(self, copy: FlatBuffer, entry: Entry) -> nn.Parameter:
        position = self._bucket.entries.index(entry)
        parameter = self._bucket.as_parameter(position, copy.views[position])
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._refuse)
        return parameter

    def hide(self) -> None:
        """Let modules hold the masters again."""
        for entry, master in self._shown:
            entry.put(master)

    def check(self) -> None:
        """Raise `UsageError` if the copies were written to, which would be lost."""
        if self._copy is not None and self._copy.views[0]._version != self._version:
            raise UsageError(
                f"parameters of unit {self._bucket.unit!r} were written to while a module computed inside "
                "onecopy.gathered. The change would be lost: edit parameters between two calls of modules, with "
                "write=True."
            )


class Computing:
    """Switches a model to its compute dtype whenever one of its modules is called.

    Args:
        model: the sharded model.
        scopes: modules whose floating-point inputs are cast, beside those of the outermost one that is called.
        dtype: the compute dtype.
        copies: one for each bucket that is open and whose masters are of another dtype.
        writes: whether masters may change between calls.
    """

    def __init__(
        self, model: nn.Module, scopes: Sequence[nn.Module], dtype: torch.dtype, copies: Sequence[Copies], writes: bool
    ) -> None:
        self._scopes = set(scopes)
        self._dtype = dtype
        self._copies = copies
        self._writes = writes
        self._calls: list[Edits] = []
        self._handles: list[RemovableHandle] = []
        before, after = untraced(self._before), untraced(self._after)
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def close(self) -> None:
        """Modules are called as they were before."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        edits = Edits()
        if not self._calls:
            for copy in self._copies:
                copy.show(renew=self._writes)
        if not self._calls or module in self._scopes:
            args, kwargs = (replace_tensors(given, self._cast, edits) for given in (args, kwargs))
        self._calls.append(edits)
        return args, kwargs

    def _after(self, *_: Any) -> None:
        if self._calls:
            self._calls.pop().undo()
        if not self._calls:
            for copy in self._copies:
                copy.hide()
            for copy in self._copies:
                copy.check()

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
