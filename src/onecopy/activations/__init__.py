"""ZeRO-R's activation checkpoints: recomputed, cut over the tensor axis (P_a), and moved off the device (P_a+cpu).

policy       `Activations`: what `onecopy.shard` is told
checkpoint   `checkpoint`: a module or function whose inside is recomputed in backward
region       one checkpointed call, on `torch.utils.checkpoint` and saved-tensor hooks
selective    which operations inside keep their outputs
partition    which inputs every tensor rank holds alike; cutting them and making them whole
store        where what is kept lies: kept (on the device), host (in host memory), disk (in a file)
"""

from onecopy.activations.checkpoint import checkpoint
from onecopy.activations.policy import Activations

__all__ = ["Activations", "checkpoint"]
