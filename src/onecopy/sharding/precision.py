"""Precision: in which dtype parameters are kept, computed with, sent, and gradients accumulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from onecopy.errors import SettingsError


@dataclass(frozen=True)
class Precision:
    """Dtypes of a sharded model. None leaves the choice as said at each field; non-floating parameters keep theirs.

    Attributes:
        compute: of whole parameters in forward and backward, and of floating-point inputs of the model. None: each
            parameter's own.
        reduce: of gradients on the wire. None: the compute dtype. Sums over ranks are taken in fp32 or wider on gloo.
        accumulate: of gradients summed over micro-batches. None: fp32, or the master dtype where that is wider.
        master: of the slices that the optimizer updates. None: fp32 under a ``compute`` of half width, else each
            parameter's own. Frozen parameters keep their own.
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
        """The precision of that short name: "fp32", "bf16" or "fp16"; None keeps every parameter's own dtype.

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


_NAMED: Final = {
    "fp32": Precision(compute=torch.float32, master=torch.float32),
    "bf16": Precision(compute=torch.bfloat16, master=torch.float32),
    "fp16": Precision(compute=torch.float16, master=torch.float32),
}
