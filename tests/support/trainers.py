"""What tests of the integrations share: tiny models made in code, data, and Trainers that say nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

VOCAB = 64


class Rows(Dataset[dict[str, Any]]):
    """Rows of random tokens that are their own labels; every row different."""

    def __init__(self, count: int = 32, length: int = 8, seed: int = 5) -> None:
        tokens = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
        self._rows = [
            {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)} for row in tokens
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def tiny_llama(seed: int = 1, layers: int = 2) -> nn.Module:
    """A Llama of some ten thousand parameters, tied embeddings among them; the same values for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: Any = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends: Any = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


def arguments(kind: type, directory: Any, **settings: Any) -> Any:
    """Training arguments for a few quiet steps on the CPU."""
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    own: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4}
    rest: dict[str, Any] = {"learning_rate": 1e-2, "save_strategy": "no", "seed": 3, "data_seed": 3}
    return kind(**(quiet | own | rest | {"output_dir": str(directory)} | settings))


def history(trainer: Any, *keys: str) -> list[dict[str, float]]:
    """What a Trainer has logged under ``keys``, in order."""
    return [
        {key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history if {*keys} & {*entry}
    ]


def tiny_tokenizer() -> Any:
    """A tokenizer of the words w3 to w63, which knows nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends: Any = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def sentences(count: int, words: int, seed: int = 0) -> list[str]:
    """Texts that `tiny_tokenizer` knows, every one different."""
    numbers = torch.randint(3, VOCAB, (count, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]
