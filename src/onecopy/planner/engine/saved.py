"""Saved: bytes that each unit of a model keeps for backward, as one forward on fake tensors shows them.

`SavedByUnit` looks at what autograd saves, `Products` at what selective recomputation would keep, and `AliveAfterUnits`
at the head's and the loss's temporaries. `simulate.describe_units` puts them around a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecopy.activations.selective import is_kept


class SavedByUnit:
    """Bytes of storages that autograd saves, each once and under the unit whose forward saved it first.

    Attributes:
        order: of the units' forwards.
        tail: bytes that the root saved after the last inner unit.
        inputs: for each unit that `onecopy.Activations` would checkpoint, bytes of the arguments that it would keep.
    """

    def __init__(self, alive: AliveAfterUnits | None = None) -> None:
        self._alive = alive
        self.tail = 0.0
        self._nbytes: dict[str, float] = {}
        # Of each unit, storages that products returned, with their bytes, and how many of these autograd saved.
        self._products: dict[str, dict[StorageWeakRef, int]] = {}
        self._saved_products: dict[str, float] = {}
        self.order: list[str] = []
        self.inputs: dict[str, float] = {}
        self._whole: set[StorageWeakRef] = set()
        self._seen: dict[StorageWeakRef, Tensor] = {}
        self._inside = [""]

    def watch(self, model: nn.Module, units: Sequence[str]) -> None:
        self._whole = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        for name, module in ((name, model.get_submodule(name)) for name in filter(None, units)):
            if next(module.children(), None) is not None and not any(name.startswith(f"{n}.") for n in self.inputs):
                self.inputs[name] = 0.0
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._enter(name, [*args, *kwargs.values()]), with_kwargs=True
            )
            module.register_forward_hook(lambda _, __, output: self._leave(output))

    def kept(self, name: str) -> float:
        """Bytes of a unit; of the root, those before its last inner unit."""
        return self._nbytes.get(name, 0.0)

    def products(self, name: str) -> float | None:
        """Bytes that products of a unit have returned; None of what is never checkpointed so."""
        holds_units = any(inner.startswith(f"{name}.") for inner in self.order)
        if name not in self.inputs or holds_units:
            return None
        return float(sum(self._products.get(name, {}).values()))

    def repeated(self, name: str) -> float:
        """Bytes of what autograd saved in a unit beside them."""
        return self.kept(name) - self._saved_products.get(name, 0.0) if name in self.inputs else 0.0

    def product(self, result: Any) -> None:
        """A product has returned ``result``."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._products.setdefault(self._inside[-1], {})[StorageWeakRef(storage)] = storage.nbytes()

    def _enter(self, name: str, arguments: list[Any]) -> None:
        if name in self.inputs:
            kept = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
            self.inputs[name] += sum(tensor.numel() * tensor.element_size() for tensor in kept)
        self._nbytes[""] = self._nbytes.get("", 0.0) + self.tail
        self.tail = 0.0
        self._inside.append(name)
        if name not in self.order:
            self.order.append(name)

    def _leave(self, output: Any) -> None:
        made = self._products.get(self._inside.pop(), {})
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                # What a unit returns lives on as the next one's input.
                made.pop(StorageWeakRef(leaf.untyped_storage()), None)
        if self._alive is not None:
            self._alive.begin(output)

    def forget(self) -> None:
        """Let go of what was seen: what autograd alone keeps lives no longer than it keeps it."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key not in self._whole and key not in self._seen:
            # Kept, so that no later storage is taken for this one.
            self._seen[key] = tensor
            where = self._inside[-1]
            if where:
                self._nbytes[where] = self._nbytes.get(where, 0.0) + storage.nbytes()
                if key in self._products.get(where, {}):
                    self._saved_products[where] = self._saved_products.get(where, 0.0) + storage.nbytes()
            else:
                self.tail += storage.nbytes()
        return tensor


class Products(TorchDispatchMode):
    """Tells of what the operations return that selective recomputation keeps."""

    def __init__(self, seen: SavedByUnit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func, args, kwargs or {}):
            self._seen.product(result)
        return result


class AliveAfterUnits(TorchDispatchMode):
    """Bytes of storages made after the last inner unit's forward and before its backward, the most at any moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known: dict[StorageWeakRef, weakref.finalize[..., Any]] = {}
        self._counts = False

    def begin(self, output: Any) -> None:
        """A unit's forward has ended with ``output``: what counts begins here, and ends with the gradient of that."""
        self.most = self._now = 0
        self._counts = True
        for key in list(self._known):
            self._known.pop(key).detach()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._end)

    def _end(self, _: Tensor) -> None:
        self._counts = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counts:
            given = {StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[StorageWeakRef]) -> None:
        key = StorageWeakRef(storage)
        # What an operation was given is no work of its own.
        if key in self._known or key in given:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._gone, key, nbytes)
        self._now += nbytes
        self.most = max(self.most, self._now)

    def _gone(self, key: StorageWeakRef, nbytes: int) -> None:
        if self._known.pop(key, None) is not None:
            self._now -= nbytes
