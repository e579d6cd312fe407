"""Alive: the bytes that operations hold at once, counted storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """The most bytes of storages that operations have made and that were there at once, beside what is ``given``."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes
