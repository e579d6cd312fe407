"""Precision: in which dtype parameters are kept, computed with, sent, and gradients accumulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from onecopy.errors import SettingsError

PIECE_NUMEL: Final = 2**20
"""Elements that are widened at a time where something narrow is computed with: 4 MiB in fp32, whatever the model."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a sharded model. Each field says what None means there. Non-floating parameters keep their dtype.

    Attributes:
        compute: dtype of whole parameters in forward and backward, and of floating-point inputs of the model and of
            each unit. None: each parameter's own. Norms with running statistics (BatchNorm) widen their parameters to
            the dtype of the statistics. The statistics are buffers and keep their dtype (`statistics.py`).
        reduce: dtype in which gradients are sent. None: the compute dtype. On gloo, sums over ranks are taken in fp32
            or wider.
        accumulate: dtype in which gradients are kept and summed over micro-batches. None: fp32, or the master dtype if
            that is wider. A narrower dtype (bf16 over fp32 masters) halves the memory of gradients, as ZeRO §3.1
            counts them. It rounds the mean over ranks once, and every sum over micro-batches. `p.grad` still shows
            the master dtype.
        master: dtype of the slices that the optimizer updates. None: fp32 if ``compute`` has half width, otherwise
            each parameter's own. Frozen parameters keep their own.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "reduce", "accumulate", "master"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise SettingsError(f"Precision.{field} must be a floating-point torch.dtype or None; found {dtype!r}")

    @staticmethod
    def of(precision: Precision | str | None) -> Precision:
        """The precision of that short name: "fp32", "bf16", "bf16-lean" or "fp16"; None keeps each parameter's dtype.

        Raises:
            SettingsError: for another name.
        """
        if precision is None:
            return Precision()
        if isinstance(precision, Precision):
            return precision
        if precision not in _NAMED:
            raise SettingsError(
                f"precision must be one of {', '.join(map(repr, _NAMED))}, an onecopy.Precision or None; "
                f"found {precision!r}"
            )
        return _NAMED[precision]

    def for_parameter(self, dtype: torch.dtype, trainable: bool) -> Dtypes:
        """The dtypes of a parameter that was built as ``dtype``."""
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, dtype, dtype)
        compute = self.compute or dtype
        if not trainable:
            return Dtypes(compute, compute, compute, dtype)
        master = self.master or (torch.promote_types(dtype, torch.float32) if self.compute else dtype)
        accumulate = self.accumulate or torch.promote_types(master, torch.float32)
        return Dtypes(compute, self.reduce or compute, accumulate, master)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one bucket; see `Precision`."""

    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype

    @property
    def sums_wider(self) -> bool:
        """Whether gradients are summed over micro-batches in more than the master dtype, which they become at last."""
        return torch.promote_types(self.accumulate, self.master) != self.master


_NAMED: Final = {
    "fp32": Precision(compute=torch.float32, master=torch.float32),
    "bf16": Precision(compute=torch.bfloat16, master=torch.float32),
    "bf16-lean": Precision(compute=torch.bfloat16, accumulate=torch.bfloat16, master=torch.float32),
    "fp16": Precision(compute=torch.float16, master=torch.float32),
}
