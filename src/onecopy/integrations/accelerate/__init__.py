"""Accelerate: its FSDP settings in onecopy's terms, for which it need not be there, and its Accelerator."""

from typing import TYPE_CHECKING, Any

from onecopy.integrations.accelerate.settings import from_accelerate as from_accelerate
from onecopy.integrations.needs import needs

if TYPE_CHECKING:
    from onecopy.integrations.accelerate.accelerator import Accelerator as Accelerator


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        needs("onecopy.integrations.accelerate.Accelerator", "accelerate")
        from onecopy.integrations.accelerate.accelerator import Accelerator

        return Accelerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
