"""Quantised: what is asked for and onecopy does not do, 4- and 8-bit weights and 8-bit optimizers, answered by formula.

bitsandbytes packs weights into bytes with a scale for each block of them, and keeps Adam's two moments as bytes.
onecopy shards parameters as they are: it cannot shard packed weights.
"""

from __future__ import annotations

from typing import Any, Final

from onecopy.planner.quantities import gigabytes

WEIGHT_BYTES: Final = {"Linear4bit": 0.5 + 4 / 64, "Linear8bitLt": 1.0}
"""Bytes of a weight: half a byte and a scale of 4 bytes for each 64 (QLoRA §3; double quantisation leaves 0.127 bits of
the scale); a byte, and a scale for each row, which is next to nothing (LLM.int8())."""

PACKED: Final = ("Params4bit", "Int8Params")
"""Its parameters, which cannot be made of fake tensors; an error names them."""

MOMENT_BYTES: Final = 1 + 4 / 256
"""Of one of Adam's moments: a byte, and a scale of 4 bytes for each 256 (Dettmers et al., 8-bit Optimizers, §2)."""

TRAINED_BYTES: Final = 16
"""Of a trained parameter in mixed precision with AdamW (ZeRO §3.1)."""


def packed(model: Any) -> str | None:
    """What to say of a model that holds layers of bitsandbytes; None if it holds none."""
    found = [m for m in model.modules() if type(m).__module__.split(".")[0] == "bitsandbytes"]
    kinds = sorted({type(m).__name__ for m in found} & set(WEIGHT_BYTES))
    if not kinds:
        return None
    numels = {kind: sum(m.weight.numel() for m in found if type(m).__name__ == kind) for kind in kinds}
    held = sum(WEIGHT_BYTES[kind] * numel for kind, numel in numels.items())
    quantised = {id(m.weight) for m in found}
    rest = [p for p in model.parameters() if id(p) not in quantised]
    trained = sum(p.numel() for p in rest if p.requires_grad)
    others = sum(p.numel() for p in rest if not p.requires_grad)
    plain = 2 * (sum(numels.values()) + others)
    return (
        f"the model holds {' and '.join(kinds)} of bitsandbytes, which onecopy cannot shard. On one GPU, by formula: "
        f"{gigabytes(held)} of packed weights, {gigabytes(2 * others)} of other frozen ones, "
        f"{gigabytes(TRAINED_BYTES * trained)} for {trained:,} trained parameters with AdamW, and activations. "
        f"onecopy shards the same model with its weights in bf16: {gigabytes(plain)} over the ranks of stage 3; give a "
        f"factory that does not quantise"
    )


def eight_bit(parameters: float) -> str:
    """What to say of an 8-bit AdamW.

    Args:
        parameters: those that are trained.
    """
    whole, small = 8 * parameters, 2 * MOMENT_BYTES * parameters
    return (
        f"AdamW is planned, no 8-bit one. By formula an 8-bit AdamW keeps {gigabytes(small)} of moments for the "
        f"{parameters / 1e9:.3g} B parameters where AdamW keeps {gigabytes(whole)}; stage 1 on 4 GPUs keeps "
        f"{gigabytes(whole / 4)} on each, of the same values. torchao's runs over onecopy's whole matrices, "
        f"bitsandbytes' has not been tried. Give --optimizer fused, foreach or for-loop"
    )
