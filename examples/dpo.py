"""Preference training with TRL's DPOTrainer: the model and its reference both sharded at stage 3.

    torchrun --nproc-per-node 2 examples/dpo.py

What differs from a run under DDP: `class Sharded(ShardedTrainer, DPOTrainer)`, and `shard=` where it is made.
"""

import copy
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

from onecopy.integrations.transformers import ShardedTrainer

WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(20))]


class Sharded(ShardedTrainer, DPOTrainer):
    """DPOTrainer over slices."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def make_data() -> Dataset:
    """Counting up is liked better than counting down."""
    starts = [2 + number % 12 for number in range(128)]
    return Dataset.from_dict(
        {
            "prompt": [f"w{start}" for start in starts],
            "chosen": [f"w{start + 1} w{start + 2}" for start in starts],
            "rejected": [f"w{start - 1} w{start - 2}" for start in starts],
        }
    )


def make_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, **ends))


set_seed(0)
model = make_model()
with tempfile.TemporaryDirectory() as folder:
    trainer = Sharded(
        model=model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(
            folder,
            max_steps=40,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=make_data(),
        processing_class=make_tokenizer(),
        shard={"stage": 3},
    )
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
