"""Hugging Face's Trainer and all that is built on it, over sharded models.

    class Sharded(onecopy.integrations.transformers.ShardedTrainer, SFTTrainer): ...
    Sharded(model=model, args=args, train_dataset=data, shard={"stage": 3}).train()

    sharded(SFTTrainer, stage=3)(model=model, args=args, train_dataset=data).train()    # the same in one line

Both need the packages transformers and accelerate.
"""

from onecopy.integrations.needs import needs

needs("onecopy.integrations.transformers", "transformers")
needs("onecopy.integrations.transformers", "accelerate")

from onecopy.integrations.transformers.trainer import ShardedTrainer as ShardedTrainer  # noqa: E402
from onecopy.integrations.transformers.trainer import sharded as sharded  # noqa: E402
