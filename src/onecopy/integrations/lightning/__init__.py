"""Lightning over sharded models: ``Trainer(strategy="onecopy_stage_3")``, or a strategy with settings of one's own.

    from onecopy.integrations.lightning import OnecopyStrategy
    Trainer(strategy=OnecopyStrategy(stage=3, precision="bf16"), devices=8)

    Fabric(strategy="onecopy_stage_3"), Fabric(strategy=OnecopyFabricStrategy(stage=3))

Importing this module registers the names. It works with the package ``lightning`` and, where that is not installed,
``pytorch_lightning``; `strategy_of` and `fabric_strategy_of` give the strategies of either where both are.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from onecopy.integrations.lightning.fabric import ShardedFabricStrategy as ShardedFabricStrategy
from onecopy.integrations.lightning.strategy import ShardedStrategy as ShardedStrategy
from onecopy.integrations.needs import needs

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@cache
def strategy_of(package: str) -> Any:
    """The strategy for Trainers of ``package``: "lightning" or "pytorch_lightning"; its names are registered there."""
    strategies = import_module(f"{_PACKAGES[package]}.strategies")
    return _registered(ShardedStrategy, "OnecopyStrategy", strategies, strategies.StrategyRegistry)


@cache
def fabric_strategy_of(package: str) -> Any:
    """The strategy for the Fabric that comes with ``package``, likewise."""
    strategies = import_module(f"{_FABRICS[package]}.strategies")
    return _registered(ShardedFabricStrategy, "OnecopyFabricStrategy", strategies, strategies.STRATEGY_REGISTRY)


def _registered(own: type, name: str, strategies: Any, registry: Any) -> Any:
    made = type(name, (own, strategies.DDPStrategy), {"__doc__": own.__doc__})
    for stage in range(4):
        registry.register(f"onecopy_stage_{stage}", made, description=f"ZeRO stage {stage}", stage=stage)
    return made


_package = needs("onecopy.integrations.lightning", *_PACKAGES)
OnecopyStrategy: Any = strategy_of(_package)
OnecopyFabricStrategy: Any = fabric_strategy_of(_package)
