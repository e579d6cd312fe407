"""Lightning over sharded models: ``Trainer(strategy="onecopy_stage_3")``, or a strategy with settings of one's own.

    from onecopy.integrations.lightning import OnecopyStrategy
    Trainer(strategy=OnecopyStrategy(stage=3, precision="bf16"), devices=8)

Importing this module registers the names. It works with the package ``lightning`` and, where that is not installed,
``pytorch_lightning``; `strategy_of` gives the strategy of either where both are.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from onecopy.integrations.lightning.strategy import ShardedStrategy as ShardedStrategy
from onecopy.integrations.needs import needs

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


@cache
def strategy_of(package: str) -> Any:
    """The strategy for Trainers of ``package``: "lightning" or "pytorch_lightning"; its names are registered there."""
    strategies = import_module(f"{_PACKAGES[package]}.strategies")
    made = type("OnecopyStrategy", (ShardedStrategy, strategies.DDPStrategy), {"__doc__": ShardedStrategy.__doc__})
    for stage in range(4):
        strategies.StrategyRegistry.register(
            f"onecopy_stage_{stage}", made, description=f"ZeRO stage {stage}", stage=stage
        )
    return made


OnecopyStrategy: Any = strategy_of(needs("onecopy.integrations.lightning", *_PACKAGES))
