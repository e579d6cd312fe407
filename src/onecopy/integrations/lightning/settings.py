"""What both of Lightning's strategies are told: settings of `onecopy.shard`, and how checkpoints are written."""

from __future__ import annotations

from typing import Any, Final

from onecopy.errors import SettingsError

_SHARDS: Final = (
    "mesh",
    "units",
    "ignored",
    "precision",
    "prefetch",
    "prefetch_bytes",
    "broadcast_buffers",
    "activations",
    "bucket_bytes",
    "defragment",
    "offload",
)


def take_settings(stage: int, checkpoints: str, settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """`onecopy.shard`'s arguments, which are taken out of ``settings``, and whether checkpoints are whole files.

    Raises:
        SettingsError: for settings that cannot work.
    """
    if checkpoints not in ("slices", "whole"):
        raise SettingsError(f'checkpoints must be "slices" or "whole"; found {checkpoints!r}')
    if "accumulate" in settings or "optimizer" in settings:
        raise SettingsError("accumulate and optimizer are the Trainer's and the module's to say")
    own: dict[str, Any] = {name: settings.pop(name) for name in _SHARDS if name in settings}
    return {"stage": stage, **own}, checkpoints == "whole"
