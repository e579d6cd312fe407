"""Norms with running statistics under `precision=`: their weights have the statistics' dtype while they compute.

Statistics are buffers and keep their dtype, for narrow ones would hardly move; and no kernel takes narrow weights
beside wide statistics. Inputs and outputs stay in the compute dtype, which the kernels allow.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from onecopy.sharding.graph.compiled import untraced

_WITH_STATISTICS: Final = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def widen_weights(model: nn.Module) -> None:
    """Have the norms of ``model`` that keep statistics compute with widened weights from now on."""
    for module in model.modules():
        if isinstance(module, _WITH_STATISTICS) and isinstance(module.running_mean, Tensor) and module.affine:
            _Widening(module)


class _Widening:
    def __init__(self, module: nn.Module) -> None:
        self._held: list[dict[str, nn.Parameter | None]] = []
        module.register_forward_pre_hook(untraced(self._before))
        # Before other hooks put other parameters there.
        module.register_forward_hook(untraced(self._after), prepend=True, always_call=True)

    def _before(self, module: Any, _: Any) -> None:
        held = dict(module._parameters)
        self._held.append(held)
        dtype: torch.dtype = module.running_mean.dtype
        for name, parameter in held.items():
            if parameter is not None and parameter.dtype != dtype:
                wide: Any = parameter.to(torch.promote_types(parameter.dtype, dtype))
                module._parameters[name] = wide

    def _after(self, module: nn.Module, *_: Any) -> None:
        if self._held:
            module._parameters.update(self._held.pop())
