"""Region: one checkpointed call. Inside, autograd saves nothing; in backward the call is made again.

Recomputation, with RNG state, autocast and early stop, is `torch.utils.checkpoint`'s (`use_reentrant=False`); it saves
the call's tensors through the saved-tensor hooks that are in force when it begins, and those are `Partition`'s. What
`Selective` keeps inside is not computed again.

One private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch.utils.checkpoint._checkpoint_without_reentrant_generator`, which `torch.distributed._composable` uses too. It
lets a module be checkpointed by hooks, so that no `forward` is replaced and names and classes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from onecopy.activations.kept import Unchanged
from onecopy.activations.partition import Partition, Saved
from onecopy.activations.selective import Selective


class _Call(NamedTuple):
    """A call under way.

    Attributes:
        checkpoint: PyTorch's generator, which ends the call's forward when it goes on.
        hooks: the saved-tensor hooks in force.
        kept: outputs of operations inside that are kept.
    """

    checkpoint: Generator[None]
    hooks: torch.autograd.graph.saved_tensors_hooks
    kept: list[Tensor]


class Region:
    """The calls of one module or function.

    Args:
        function: what to call again in backward.
        partition: keeps the calls' tensors that require a gradient; others (token ids, masks, rotary angles) are shared
            by many regions as a rule, and copies of them would cost more than they save.
        selective: keeps the outputs of dear operations inside; None computes everything again.

    Attributes:
        is_alike: for each argument, by position or name, what ranks of the tensor axis found when it was first seen.
    """

    def __init__(self, function: Callable[..., Any], partition: Partition, selective: Selective | None = None) -> None:
        self._function = function
        self._partition = partition
        self._selective = selective
        self.is_alike: dict[int | str, bool] = {}
        self._open: list[_Call] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins; it ends with `end`, even if it raises."""
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        others = {key: value for key, value in arguments.items() if key not in tensors}
        count, names, function = len(args), list(kwargs), self._function

        def again(*values: Tensor) -> Any:
            given = others | dict(zip(keys, values, strict=True))
            return function(*[given[position] for position in range(count)], **{name: given[name] for name in names})

        keys = list(tensors)
        how = [self._how(key, tensor) for key, tensor in tensors.items()]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack(how), self._unpack)
        kept: list[Tensor] = []
        contexts = noop_context_fn if self._selective is None else partial(self._selective.contexts, kept)
        generator = _checkpoint_without_reentrant_generator(
            again, True, contexts, "default", False, True, *tensors.values()
        )
        hooks.__enter__()
        try:
            next(generator)
        except BaseException:
            hooks.__exit__()
            raise
        self._open.append(_Call(generator, hooks, kept))

    def end(self, returned: Any = None, *, failed: bool = False) -> None:
        """The call that began last has returned ``returned``, or raised."""
        if not self._open:
            return
        call = self._open.pop()
        try:
            self._partition.end_call()
            if failed:
                call.checkpoint.close()
            else:
                next(call.checkpoint, None)
                if self._selective is not None:
                    self._selective.count(call.kept, returned)
        finally:
            call.hooks.__exit__()

    def _how(self, key: int | str, tensor: Tensor) -> bool | None:
        """Whether an argument is to be cut; None if it is to be left to autograd."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        if key not in self.is_alike:
            self.is_alike[key] = self._partition.is_alike(tensor)
        return self.is_alike[key]

    def _pack(self, how: list[bool | None]) -> Callable[[Tensor], Saved | Unchanged]:
        """A hook for the tensors of one call, which come in order."""
        following = iter(how)

        def pack(tensor: Tensor) -> Saved | Unchanged:
            cut = next(following, None)
            return Unchanged(tensor) if cut is None else self._partition.save(tensor, cut=cut)

        return pack

    def _unpack(self, packed: Saved | Unchanged) -> Tensor:
        return self._partition.restore(packed) if isinstance(packed, Saved) else packed.get()
