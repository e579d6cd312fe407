"""Loss: for which models the loss of the head can be computed in chunks (`onecopy.chunk_loss`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CHUNKED: Final = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3")
"""`model_type`s of transformers whose loss is the cross-entropy of `lm_head(hidden)` and nothing else: no scaled or
capped logits, no loss of a router. A test holds each to transformers' own loss."""


def chunks_loss(settings: Mapping[str, Any]) -> bool:
    """Whether a causal LM with this config can; ``settings`` as in its config.json."""
    return settings.get("model_type") in CHUNKED
