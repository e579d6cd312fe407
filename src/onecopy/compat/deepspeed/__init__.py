"""DeepSpeed's interface: programs written for it run over onecopy when their import names this module.

    import deepspeed                            # before
    from onecopy.compat import deepspeed        # after

`initialize` makes an engine of a model and a config. Every key of the config does what DeepSpeed's documentation says,
or concerns speed and memory alone, or is an error with a sentence. DeepSpeed itself is not needed.
"""

from __future__ import annotations

from onecopy.compat.deepspeed import zero as zero
from onecopy.compat.deepspeed.engine import Engine as DeepSpeedEngine
from onecopy.compat.deepspeed.initialize import add_config_arguments as add_config_arguments
from onecopy.compat.deepspeed.initialize import init_distributed as init_distributed
from onecopy.compat.deepspeed.initialize import initialize as initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"]
