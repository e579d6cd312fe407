"""onecopy: ZeRO for PyTorch. One copy of every model state across the ranks that train it.

Names that need torch load at their first use, so that the command line and the planner's formulas never wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onecopy import errors as errors
from onecopy.stage import Stage
from onecopy.version import __version__ as __version__

if TYPE_CHECKING:
    from onecopy import activations as activations
    from onecopy.activations.policy import Activations
    from onecopy.checkpoint.export import Exported, export
    from onecopy.checkpoint.load import Loaded, load
    from onecopy.checkpoint.pretrained import load_pretrained
    from onecopy.checkpoint.save import save
    from onecopy.checkpoint.save_pretrained import save_pretrained
    from onecopy.checkpoint.writing import Saving
    from onecopy.integrations.accelerate import from_accelerate
    from onecopy.integrations.chunked_loss import chunk_loss
    from onecopy.integrations.deepspeed import from_deepspeed
    from onecopy.loss.cross_entropy import chunked_cross_entropy
    from onecopy.memory.store.offload import Offload
    from onecopy.observe.ledger import Entry, Ledger, Traffic
    from onecopy.resilience.meeting import join
    from onecopy.resilience.resilient import resilient
    from onecopy.resilience.run import Run
    from onecopy.sharding.model.tiled import tiled
    from onecopy.sharding.setup.api import arena, ledger, meter, padded_numel, shard
    from onecopy.sharding.setup.averages import Ema, ema
    from onecopy.sharding.setup.needs import needs_whole
    from onecopy.sharding.setup.profile import Profile, profile
    from onecopy.sharding.setup.whole import gathered, materialize
    from onecopy.sharding.tensor.precision import Precision
    from onecopy.sharding.tensor.sliced import SlicedTensor
    from onecopy.tuner.tune import tune

__all__ = [
    "Activations",
    "Ema",
    "Entry",
    "Exported",
    "Ledger",
    "Loaded",
    "Offload",
    "Precision",
    "Profile",
    "Run",
    "Saving",
    "SlicedTensor",
    "Stage",
    "Traffic",
    "activations",
    "arena",
    "chunk_loss",
    "chunked_cross_entropy",
    "ema",
    "export",
    "from_accelerate",
    "from_deepspeed",
    "gathered",
    "join",
    "ledger",
    "load",
    "load_pretrained",
    "materialize",
    "meter",
    "needs_whole",
    "padded_numel",
    "profile",
    "resilient",
    "save",
    "save_pretrained",
    "shard",
    "tiled",
    "tune",
]

_HOMES = {
    "onecopy.activations.policy": ("Activations",),
    "onecopy.checkpoint.export": ("Exported", "export"),
    "onecopy.checkpoint.load": ("Loaded", "load"),
    "onecopy.checkpoint.pretrained": ("load_pretrained",),
    "onecopy.checkpoint.save": ("save",),
    "onecopy.checkpoint.save_pretrained": ("save_pretrained",),
    "onecopy.checkpoint.writing": ("Saving",),
    "onecopy.memory.store.offload": ("Offload",),
    "onecopy.observe.ledger": ("Entry", "Ledger", "Traffic"),
    "onecopy.integrations.accelerate": ("from_accelerate",),
    "onecopy.integrations.chunked_loss": ("chunk_loss",),
    "onecopy.integrations.deepspeed": ("from_deepspeed",),
    "onecopy.loss.cross_entropy": ("chunked_cross_entropy",),
    "onecopy.resilience.meeting": ("join",),
    "onecopy.resilience.resilient": ("resilient",),
    "onecopy.resilience.run": ("Run",),
    "onecopy.sharding.model.tiled": ("tiled",),
    "onecopy.sharding.setup.api": ("arena", "ledger", "meter", "padded_numel", "shard"),
    "onecopy.sharding.tensor.precision": ("Precision",),
    "onecopy.sharding.setup.profile": ("Profile", "profile"),
    "onecopy.sharding.tensor.sliced": ("SlicedTensor",),
    "onecopy.sharding.setup.averages": ("Ema", "ema"),
    "onecopy.sharding.setup.needs": ("needs_whole",),
    "onecopy.tuner.tune": ("tune",),
    "onecopy.sharding.setup.whole": ("gathered", "materialize"),
}


def __getattr__(name: str) -> Any:
    if name == "activations":
        return import_module("onecopy.activations")
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
