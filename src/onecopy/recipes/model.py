"""Model: a causal LM of transformers, from a config, from a local directory, or a small GPT-2."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecopy.errors import SettingsError
from onecopy.integrations.chunked_loss import chunk_loss
from onecopy.recipes.config import Config


def build_architecture(config: Config, vocabulary: int) -> nn.Module:
    """The same model with random weights, whatever a directory holds: for fake tensors, which have no values."""
    return build_model(config, vocabulary, weights=False)


def build_model(config: Config, vocabulary: int, *, weights: bool = True) -> nn.Module:
    """The model to train, on the CPU in fp32; random weights depend on torch's seed alone.

    Args:
        vocabulary: tokens of the data; what a given model has must be enough for them. The small GPT-2 has as many, or
            the next number that ``parallel.tensor`` divides, where ``parallel.sequence`` cuts it.
        weights: read those of a directory.

    Raises:
        SettingsError: if the model knows fewer tokens than the data has.
    """
    # Not at the top: transformers takes seconds to import, and one rank may be busy with data meanwhile.
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()  # Every rank would draw one.
    path = config.model.path
    if not path:
        # Tokens are added that no text has, so that ranks can share the vocabulary evenly.
        parts = config.parallel.tensor if config.parallel.sequence else 1
        small = transformers.GPT2Config(
            vocab_size=-(-vocabulary // parts) * parts,
            n_positions=config.data.sequence_length,
            n_layer=config.model.layers,
            n_embd=config.model.hidden,
            n_head=config.model.heads,
            # So short a training overfits nothing; dropout would only slow it down.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        return _for_training(transformers.GPT2LMHeadModel(small), config)
    causal = transformers.AutoModelForCausalLM
    if Path(path).is_file() or not weights:
        settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        model = causal.from_config(settings, dtype=torch.float32)
    else:
        model = causal.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    known = model.get_input_embeddings().num_embeddings
    if known < vocabulary:
        raise SettingsError(
            f"the model in {path!r} knows {known} tokens but the data's tokenizer has {vocabulary}; "
            f"set data.tokenizer to the model's own, or a larger vocab_size"
        )
    return _for_training(model, config)


def _for_training(model: Any, config: Config) -> nn.Module:
    model.config.use_cache = False
    # transformers derives the loss from the class's name, which does not say it for GPT-2, and would warn.
    model.loss_type = model.loss_type or "ForCausalLM"
    if config.loss.chunked:
        chunk_loss(model)
    trained: nn.Module = model.train()
    return trained
