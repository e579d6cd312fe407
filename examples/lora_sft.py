"""LoRA fine-tuning with TRL's SFTTrainer, the model sharded at stage 3.

    torchrun --nproc-per-node 2 examples/lora_sft.py

What differs from a run under DDP: `sharded(SFTTrainer, stage=3)` in place of `SFTTrainer`.
"""

import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from onecopy.integrations.transformers import sharded

WORDS = ["<pad>", "<s>", "</s>", "zero", "one", "two", "three", "four", "five", "six", "seven", "plus", "is"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def make_data() -> Dataset:
    """Sums of two small numbers."""
    numbers = WORDS[3:11]
    sums = [(a, b) for a in range(8) for b in range(8 - a)] * 8
    return Dataset.from_dict({"text": [f"{numbers[a]} plus {numbers[b]} is {numbers[a + b]}" for a, b in sums]})


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


with tempfile.TemporaryDirectory() as folder:
    trainer = sharded(SFTTrainer, stage=3)(
        model=make_model(),
        args=SFTConfig(
            folder,
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=5e-2,
            logging_steps=5,
            save_steps=20,
            report_to="none",
            use_cpu=True,
        ),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        train_dataset=make_data(),
        processing_class=make_tokenizer(),
    )
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
