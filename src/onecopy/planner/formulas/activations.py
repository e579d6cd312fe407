"""Activations: bytes that forward keeps for backward, by ZeRO §6.1 and Korthikanti et al. (MLSys 2023).

b samples in a micro-batch, s tokens in a sequence, h hidden, L layers, a heads, t tensor-parallel degree, M
model-parallel degree. What a linear layer keeps grows with b·s·h; attention without a fused kernel adds the
a·s² scores.
"""

from __future__ import annotations

from typing import Final, Literal

from onecopy.loss.chunks import chunk_rows

Recompute = Literal["none", "selective", "full"]

HIDDEN_COPIES: Final = {"gpt2": 34 / 2, "llama": 28, "smollm2": 24, "qwen3": 38, "gemma": 48}
"""Copies of the hidden state that one layer keeps, of 2 bytes each: 34sbh for a GPT (Korthikanti); others as measured
on SmolLM2-1.7B (24), Llama-3.1-8B (28), Qwen3-4B (38) and gemma-1.1-2b (48) with fused attention."""

WHOLE_SHARE: Final = 10 / 34
"""Share of what a layer keeps that tensor parallelism leaves whole on every rank: 10 of a GPT's 34sbh (Korthikanti et
al.). That other families keep the same share is an assumption."""

GATHERED_SHARE: Final = 4 / 34
"""Share of it that is whole where the rest is cut along the sequence too: the inputs of attention and of the MLP, which
PyTorch's styles gather and keep (2sbh each; Megatron gathers them again)."""

LOSS_BYTES: Final = 12
"""Bytes for each of the b·s·vocab logits at the height of the loss's backward, beside the logits themselves: three in
fp32, the log-probabilities, their gradient, and that of the logits. So it is in transformers' `ForCausalLMLoss`."""

IN_PLACE_LOSS_BYTES: Final = 4
"""Likewise of a fused loss that writes the gradient over fp32 logits, as Megatron's and flash-attention's do."""


def layer_bytes(
    micro_batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    fused_attention: bool = False,
) -> float:
    """Bytes that one GPT layer keeps in 16-bit training, without checkpoints unless asked.

    Source: Korthikanti et al.. sbh(34 + 5as/h) on one device; sbh(10 + 24/t + 5as/(ht)) with tensor parallelism;
    (sbh/t)(34 + 5as/h) with sequence parallelism too; 34sbh/t with selective recomputation, which a fused attention
    kernel amounts to; 2sbh with full recomputation.

    Args:
        micro_batch: b.
        sequence: s.
        hidden: h.
        heads: a.
        tensor_parallel: t.
        sequence_parallel: the parts that tensor parallelism leaves whole are split along the sequence.
        recompute: "selective" recomputes attention, "full" the whole layer.
        fused_attention: a kernel that keeps no scores (FlashAttention); drops the 5as/h term.
    """
    sbh = float(sequence * micro_batch * hidden)
    scores = 0.0 if fused_attention or recompute == "selective" else 5 * heads * sequence / hidden
    if recompute == "full":
        return 2 * sbh
    if sequence_parallel:
        return sbh / tensor_parallel * (34 + scores)
    return sbh * (10 + (24 + scores) / tensor_parallel)


def copies_bytes(
    micro_batch: int,
    sequence: int,
    hidden: int,
    copies: float,
    element_bytes: float = 2,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one layer keeps when it keeps ``copies`` of the hidden state (`HIDDEN_COPIES`).

    Args:
        tensor_parallel: t, which divides all but `WHOLE_SHARE` of them.
        sequence_parallel: all but `GATHERED_SHARE`.
    """
    share = share_of_layer(tensor_parallel, sequence_parallel=sequence_parallel)
    return copies * micro_batch * sequence * hidden * element_bytes * share


def share_of_layer(tensor_parallel: int, *, sequence_parallel: bool = False) -> float:
    """The share of what a layer keeps that each of t ranks keeps: (10 + 24/t) / 34, or (4 + 30/t) / 34."""
    whole = GATHERED_SHARE if sequence_parallel else WHOLE_SHARE
    return whole + (1 - whole) / tensor_parallel


def checkpoint_bytes(
    micro_batch: int,
    sequence: int,
    hidden: int,
    layers: int,
    *,
    model_parallel: int = 1,
    partitioned: bool = False,
    on_cpu: bool = False,
    element_bytes: float = 2,
    layers_per_checkpoint: int = 1,
) -> float:
    """Bytes on the device of one activation checkpoint a layer: 2bshL in fp16.

    Source: ZeRO §6.1 and §8 (P_a divides by M, P_a+cpu leaves almost nothing); ZeRO-Infinity for ``ci`` layers
    between checkpoints. The 100B example of ZeRO §6.1 prints 33 GB, which is half of what this gives (67.1 GB): it
    holds at one byte an element; its §3.2 says "around 60 GB". The 16-fold reduction by P_a agrees.

    Args:
        model_parallel: M.
        partitioned: P_a, each of the M ranks keeps its part.
        on_cpu: P_a+cpu, parts move to host memory.
        layers_per_checkpoint: ci.
    """
    if on_cpu:
        return 0.0
    whole = element_bytes * micro_batch * sequence * hidden * layers / layers_per_checkpoint
    return whole / model_parallel if partitioned else whole


def product_bytes(
    micro_batch: int, sequence: int, hidden: int, features: int, element_bytes: float = 2, *, tensor_parallel: int = 1
) -> float:
    """Bytes of what one layer's matrix products and its fused attention return, which selective recomputation keeps.

    Each product returns its ``features`` of each token, and attention returns h. Attention's few bytes of log-sums are
    left out.

    Args:
        features: of all the layer's products: 9h of a GPT (3h of the projections, h, 4h and h).
        tensor_parallel: t, see `products_over`.
    """
    state = element_bytes * micro_batch * sequence * hidden
    return products_over(state * (features / hidden + 1), state, tensor_parallel)


def products_over(products: float, state: float, tensor_parallel: int) -> float:
    """What of ``products`` each of t ranks keeps: a part, but for the two products that are summed over the ranks.

    Args:
        products: bytes of what the products of a layer return.
        state: bytes of its hidden state, which each of those two returns whole.
    """
    return 2 * state + (products - 2 * state) / tensor_parallel


def total_bytes_estimate(micro_batch: int, sequence: int, hidden: int, layers: int, element_bytes: float = 2) -> float:
    """Bytes of all activations of a GPT without checkpoints: 12·h·b·s·L elements (ZeRO §3.2)."""
    return 12.0 * hidden * micro_batch * sequence * layers * element_bytes


def logits_bytes(
    micro_batch: int, sequence: int, vocabulary: int, element_bytes: float = 2, *, loss_bytes: float = LOSS_BYTES
) -> float:
    """Bytes of the logits and of the loss's temporaries on top of all layers: 14 for each of b·s·vocab in bf16.

    Args:
        element_bytes: of a logit; the model's output holds them through backward.
        loss_bytes: `LOSS_BYTES`, or less for a loss that spares temporaries.
    """
    return (element_bytes + loss_bytes) * micro_batch * sequence * vocabulary


def chunked_loss_bytes(
    micro_batch: int,
    sequence: int,
    vocabulary: int,
    hidden: int,
    element_bytes: float = 2,
) -> float:
    """Bytes of a loss made in chunks (`onecopy.chunked_cross_entropy`) at its height, with no logits beside it.

    One chunk's logits in fp32 and their gradient in the compute dtype, and the gradients of the head and of its input,
    which are made in forward.

    Args:
        element_bytes: of the compute dtype; fp32's gradient is made in place.
    """
    tokens = micro_batch * sequence
    logits = (4 + (element_bytes if element_bytes < 4 else 0)) * min(chunk_rows(tokens), tokens) * vocabulary
    return logits + element_bytes * hidden * (tokens + vocabulary)


def working_bytes(
    micro_batch: int, sequence: int, hidden: int, heads: int, layers_per_checkpoint: int = 1, *, fused: bool = False
) -> float:
    """Bytes recomputed between two checkpoints: b·s·ci·(16h + 2as) (ZeRO-Infinity)."""
    scores = 0 if fused else 2 * heads * sequence
    return float(micro_batch * sequence * layers_per_checkpoint * (16 * hidden + scores))


def largest_linear_bytes(hidden: int) -> float:
    """Bytes of the largest linear layer's parameters and gradients in fp16: 4·h·4h (ZeRO-Infinity)."""
    return 4.0 * hidden * 4 * hidden


def block_parallel_elements(
    micro_batch: int,
    sequence: int,
    hidden: int,
    *,
    recompute: bool = True,
    partitioned: bool = False,
    early_stop: bool = False,
) -> float:
    """Elements of activations that tensor parallelism sends for one transformer block: 12·b·s·h; P_a adds b·s·h.

    To be multiplied by (M - 1)/M. Source: ZeRO §8: two all-reduces in forward, two in backward and, where the block is
    recomputed, two more, each of twice b·s·h.

    Args:
        partitioned: P_a, an all-gather of b·s·h.
        early_stop: PyTorch ends a recomputation before its last all-reduce, whose result nobody keeps: 10·b·s·h.
    """
    again = 0 if not recompute else 2 if early_stop else 4
    return (8.0 + again + partitioned) * micro_batch * sequence * hidden
