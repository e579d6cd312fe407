"""What both of Lightning's strategies are told: settings of `onecopy.shard`, and how checkpoints are written."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final

from onecopy.errors import SettingsError

_SHARDS: Final = (
    "mesh",
    "units",
    "ignored",
    "whole",
    "precision",
    "prefetch",
    "prefetch_bytes",
    "broadcast_buffers",
    "activations",
    "bucket_bytes",
    "defragment",
    "offload",
    "copies",
)

_LIGHTNINGS: Final = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""What DDPStrategy takes and goes by here too."""

_DDPS: Final = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb", "init_sync")
"""What decides how DDP works and not what it computes. onecopy needs none of it."""


def take_settings(stage: int, checkpoints: str, settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """`onecopy.shard`'s arguments, which are taken out of ``settings``, and whether checkpoints are whole files.

    What is left in ``settings`` is for DDPStrategy.

    Raises:
        SettingsError: for settings that cannot work.
    """
    if checkpoints not in ("slices", "whole"):
        raise SettingsError(f'checkpoints must be "slices" or "whole"; found {checkpoints!r}')
    if "accumulate" in settings or "optimizer" in settings:
        raise SettingsError("accumulate and optimizer are the Trainer's and the module's to say")
    own: dict[str, Any] = {name: settings.pop(name) for name in _SHARDS if name in settings}
    for name in _DDPS:
        settings.pop(name, None)
    for name in settings:
        if name not in _LIGHTNINGS:
            near = get_close_matches(name, (*_SHARDS, *_LIGHTNINGS, "stage", "checkpoints"), n=1)
            known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join((*_SHARDS, *_LIGHTNINGS))}"
            raise SettingsError(f"a strategy of onecopy has no setting {name!r}; {known}")
    return {"stage": stage, **own}, checkpoints == "whole"
