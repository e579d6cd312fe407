"""checkpoint: a module or function whose inside is recomputed in backward, its inputs cut and moved as asked for.

One private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py: `Module._compiled_call_impl`,
which `Module.compile` sets.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from onecopy.activations.kept import Store
from onecopy.activations.partition import Partition
from onecopy.activations.region import Region
from onecopy.activations.selective import Selective
from onecopy.activations.store import make_store
from onecopy.comm.mesh import Axis, make_mesh
from onecopy.errors import SettingsError, UsageError
from onecopy.memory.arena import Arena
from onecopy.memory.staging import Staging
from onecopy.memory.store.movers import Movers
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter

F = TypeVar("F", bound=Callable[..., Any])

_REGION = "_onecopy_region"
_REASON = (
    "onecopy keeps a checkpointed module's inputs before its forward: compile the module, or without fullgraph=True"
)


def checkpoint(
    target: F,
    mesh: DeviceMesh | None = None,
    *,
    offload: str | os.PathLike[str] | None = None,
    selective: bool = False,
    ledger: Ledger | None = None,
    meter: Meter | None = None,
) -> F:
    """Keep only the inputs of a module or function for backward, and compute its inside again there.

    It behaves as `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: RNG states, autocast, keyword, nested
    and other arguments are preserved, and dropout draws the same masks again. On top of that, an argument that requires
    a gradient and that all ranks of ``mesh`` hold alike is kept in M parts, one on each rank, and all-gathered before
    it is needed (P_a of ZeRO §6.1). One that is cut already, as by sequence parallelism, is kept as it is.

    Bytes kept: the arguments, ÷ M where they are cut. Bytes sent: (M - 1)/M of those that are cut, in each backward.
    With ``selective`` also the outputs of matrix products, convolutions and fused attention inside, on their device.

    Args:
        target: a module, which is changed in place, or a function.
        mesh: the tensor axis, ``mesh["tensor"]``; None cuts nothing.
        offload: where the arguments are kept: None on their device, "cpu" in host memory, or the path of a directory.
        selective: keep the outputs of dear operations too, so that only cheap ones are computed again.
        ledger: where gathers, and what moves off the device and back, are booked, such as `onecopy.ledger(model)`.
        meter: where bytes are counted, such as `onecopy.meter(model)`.

    Returns:
        ``target`` if it is a module; otherwise a function to call in its place.

    Raises:
        SettingsError: for a mesh of other axes than "tensor", or an ``offload`` that cannot work.
        UsageError: if a module is checkpointed already.
        OffloadError: if no file can be made in the directory.
    """
    ledger = ledger or Ledger()
    meter = meter or Meter(ledger)
    axis = Axis("tensor", None, Staging(), ledger)
    if mesh is not None:
        if mesh.mesh_dim_names not in (("tensor",), ("tp",)):
            raise SettingsError(
                f'activations are cut over the tensor axis: pass mesh["tensor"]; found axes {mesh.mesh_dim_names}.'
            )
        axis = make_mesh(mesh, shards=True, ledger=ledger, staging=Staging()).tensor
    kept = Selective(meter) if selective else None
    store = make_store(offload, meter, Movers(meter, ledger))
    return checkpoint_over(target, axis, store, unit="", selective=kept)


def checkpoint_over(
    target: F,
    axis: Axis,
    store: Store,
    *,
    unit: str,
    arena: Arena | None = None,
    selective: Selective | None = None,
) -> F:
    """As `checkpoint`, over an axis and into a store that are made already.

    Args:
        unit: the name under which gathers are booked.
        arena: where inputs that stay on the device are kept; None takes memory for them from PyTorch.
        selective: keeps the outputs of dear operations; None computes everything again.
    """
    partition = Partition(axis, store, unit, arena)
    if isinstance(target, nn.Module):
        if hasattr(target, _REGION):
            raise UsageError(f"this {type(target).__name__} is checkpointed already")
        region = Region(target.forward, partition, selective)
        setattr(target, _REGION, region)
        # Other hooks of the module stay outside: they run once, with the inputs and outputs that callers see.
        begin, end = (
            torch.compiler.disable(functools.partial(hook, region), reason=_REASON) for hook in (_begin, _end)
        )
        target.register_forward_pre_hook(begin, with_kwargs=True)
        target.register_forward_hook(end, prepend=True, always_call=True)
        return target
    region = Region(target, partition, selective)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        region.begin(args, kwargs)
        try:
            result = target(*args, **kwargs)
        except BaseException:
            region.end(failed=True)
            raise
        region.end(result)
        return result

    wrapped: Any = call
    checkpointed: F = wrapped
    return checkpointed


def _begin(region: Region, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module._compiled_call_impl is not None and torch.is_grad_enabled():
        raise UsageError(
            f"this {type(module).__name__} is checkpointed and was compiled in place, so that its forward is compiled "
            f"and its recomputation is not: put `torch.compile(block)` into its place before it is checkpointed"
        )
    region.begin(args, kwargs)


def _end(region: Region, _: nn.Module, __: Any, output: Any) -> None:
    # A forward that raised comes here too, without an output.
    region.end(output, failed=output is None)
