"""deepspeed.zero: building models, and parameters whole for a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onecopy.errors import SettingsError
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.setup.whole import gathered
from onecopy.sharding.tensor.sliced import SlicedTensor


class Init:
    """Where a model is built. It is whole on every rank until `initialize` shards it, one copy on each.

    A model too large for that is built inside `torch.device("meta")`, sharded with `onecopy.shard`, and given values by
    `onecopy.materialize` or `onecopy.load_pretrained`.

    Args:
        module: taken as it is.
        dtype: of parameters that are made inside.
        remote_device: must be None or "cpu": nothing is kept on NVMe.
        enabled, kwargs: as DeepSpeed has them; those that are about how it cuts make no difference.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        remote_device: str | None = None,
        enabled: bool = True,
        **kwargs: Any,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise SettingsError(
                f"zero.Init(remote_device={remote_device!r}) cannot be honoured, because onecopy builds models on "
                "the CPU: leave it out"
            )
        self._dtype = dtype if enabled else None
        self._before: torch.dtype | None = None

    def __enter__(self) -> Init:
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)


@contextmanager
def GatheredParameters(
    params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Parameters whole inside a `with` block, as modules hold them; every rank must enter it.

    Args:
        params: of a sharded model; others are whole anyway.
        modifier_rank: whose changes are kept. None: changes are an error.
    """
    found = list(params.parameters()) if isinstance(params, nn.Module) else params
    wanted = [found] if isinstance(found, torch.Tensor) else list(found)
    sliced = [parameter for parameter in wanted if isinstance(parameter, SlicedTensor)]
    if not enabled or not sliced:
        yield
        return
    whole_model = isinstance(params, nn.Module) and find_engine(params) is not None
    with gathered(params if whole_model else sliced, write=modifier_rank is not None, source=modifier_rank):
        yield
