"""onecopy: ZeRO for PyTorch. One copy of every model state across the ranks that train it."""

from onecopy.comm.ledger import Entry, Ledger, Traffic
from onecopy.sharding.api import ledger, meter, padded_numel, shard
from onecopy.sharding.precision import Precision
from onecopy.sharding.profile import Profile, profile
from onecopy.sharding.sliced import SlicedTensor
from onecopy.sharding.whole import gathered, materialize
from onecopy.stage import Stage

__version__ = "0.1.0"

__all__ = [
    "Entry",
    "Ledger",
    "Precision",
    "Profile",
    "SlicedTensor",
    "Stage",
    "Traffic",
    "gathered",
    "ledger",
    "materialize",
    "meter",
    "padded_numel",
    "profile",
    "shard",
]
