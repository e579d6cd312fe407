"""Fake ranks: a process group that sends nothing and tensors that hold nothing, so that one process can be any of N.

Tensors have shapes, dtypes and storages of the right size but no memory. The few values that the engine decides by (is
the model the same everywhere, in which order do units come) are kept beside small tensors made from Python values, and
every other rank is taken to agree.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch.testing._internal.distributed.fake_pg.FakeStore` and its backend "fake";
`torch._subclasses.fake_tensor.{FakeTensor, FakeTensorMode, unset_fake_temporarily}`, and of the mode
`fake_tensor_converter.tensor_memo`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from onecopy.errors import UsageError
from onecopy.sharding.tensor.sliced import SlicedTensor

aten = torch.ops.aten

_SMALL: Final = 1 << 16
"""Elements up to which a tensor's values are kept: control messages have some bytes for each parameter."""


@contextmanager
def fake_ranks(shard: int, replicate: int = 1) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of ``shard * replicate`` ranks; every tensor made inside is fake.

    Yields:
        The mesh, None without a replicate axis.

    Raises:
        UsageError: if a process group exists already.
    """
    if dist.is_initialized():
        raise UsageError("a simulation makes a process group of its own; run it where none is initialised.")
    size = shard * replicate
    mesh = None
    if size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        if replicate > 1:
            mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        with fake_tensors(), _KnownValues():
            yield mesh
    finally:
        if size > 1:
            dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside is fake."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # The engine asks whether a tensor's memory is a bucket's; for fake ones the answer is no.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def on_meta(build: Callable[[], Any]) -> Any:
    """What ``build`` makes on the meta device, where no tensor is fake: for parameters that fake ones cannot be."""
    with unset_fake_temporarily(), torch.device("meta"):
        return build()


class AnyValues(TorchDispatchMode):
    """Lets a model be built: answers 0 or False where it asks for a value, none of which is kept, and lets it be moved.

    `torch.nn.init.trunc_normal_` draws again until no value lies outside of its bounds, which fake tensors cannot say.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].is_floating_point() else 0
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                # A memo of what has been made refers to it, and `Module.to` swaps only what nothing refers to.
                leaf.fake_mode.fake_tensor_converter.tensor_memo.clear()
        return result


class _KnownValues(TorchDispatchMode):
    """Computes small tensors that follow from Python values for real too, so that they can be read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, SlicedTensor) for kind in types):
            return NotImplemented
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten._local_scalar_dense.default and inputs[0] in self._known:
            with unset_fake_temporarily():
                return self._known[inputs[0]].item()
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if func.namespace != "aten":
            # A collective: the other ranks have what this one has.
            return result
        if self._follows(func, inputs) and all(output.numel() <= _SMALL for output in outputs):
            with unset_fake_temporarily():
                self._compute(func, args, kwargs, outputs)
        elif func._schema.is_mutable:
            for tensor in inputs:
                self._known.pop(tensor, None)
        return result

    def _follows(self, func: Any, inputs: list[Tensor]) -> bool:
        """Whether the operation's outputs are determined by values that are known."""
        if not inputs:
            return func is aten.zeros.default
        return all(tensor in self._known or not isinstance(tensor, FakeTensor) for tensor in inputs)

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any, outputs: list[FakeTensor]) -> None:
        def real(tensor: Tensor) -> Tensor:
            known: Tensor = self._known.get(tensor, tensor)
            return known

        args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
        result = args[0].clone() if func is aten.lift_fresh.default else func(*args, **kwargs)
        values = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._known.update(zip(outputs, values, strict=True))
