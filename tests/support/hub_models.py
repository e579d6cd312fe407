"""Small models of `transformers`: two layers, without dropout, of the random numbers that are torch's turn."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def gpt2(vocab: int, *, hidden: int = 24, heads: int = 2, positions: int = 32, **settings: Any) -> GPT2LMHeadModel:
    """Learned positions, transposed Conv1D weights, a tied head, and the key bias that blows up Adam's noise."""
    config = GPT2Config(vocab_size=vocab, n_embd=hidden, n_head=heads, n_positions=positions, n_layer=2, **settings)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def llama(vocab: int, *, hidden: int = 24, inner: int = 40, **settings: Any) -> LlamaForCausalLM:
    """Grouped-query attention, rotary positions, SwiGLU; an untied head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            **settings,
        )
    )
