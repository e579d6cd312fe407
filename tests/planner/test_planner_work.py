"""How much a model computes. Oracles: products by hand, sizes that publishers give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import plan_adapted
from hub_configs import LLAMA_8B
from onecopy.errors import SettingsError
from onecopy.planner.answer.describe import describe
from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.shape import Shape
from ranks import run_ranks

ONE = Machine(1, gpu_of("h100"))
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


def described(*arguments: Any, **options: Any) -> Shape:
    """In a child: factories are imported, and fake tensors leave threads behind."""
    return run_ranks(1, lambda rank: describe(*arguments, **options), group=False)[0]


def test_a_convolution_is_counted() -> None:
    """By hand: 2 × 16 × 16 places × 8 × 8 channels × 9 weights; backward has no inputs to compute a gradient for."""
    shape = described("plan_images:build")
    assert shape.work == (2 * 256 * 64 * 9, 2 * 256 * 64 * 9, None)
    found = estimate(Job(shape, 1), ONE, Option(0, 4, 2, "off", "none", 1))
    assert found.rate == "samples"
    assert found.tokens_per_second == pytest.approx(8 / found.seconds.total)
    assert found.speed.endswith(" samples/s")


def test_frozen_weights_have_no_gradient_and_a_table_is_no_product() -> None:
    """By hand, of 48 tokens: forward 2·64·64 + 4·64·4 each; backward the adapter's own gradients, and through `up`."""
    shape = described("plan_adapted:build", sequence=48)
    base, half = 64 * 64, 64 * plan_adapted.RANK
    assert shape.work == (48 * 2 * (base + 2 * half), 48 * 2 * 3 * half, 48)
    assert shape.rate == "tokens"
    assert described("plan_adapted:build").work.tokens == 32  # type: ignore[union-attr]


def test_work_over_several_micro_batches_is_what_was_counted() -> None:
    """By hand: eight samples, recomputed; an H100's share of the peak at a width of 2048 is the fitted 0.378."""
    shape = described("plan_adapted:build", sequence=48)
    assert shape.work is not None
    found = estimate(Job(shape, 48), ONE, Option(0, 2, 4, "units", "none", 1))
    moved = 4 * 4 * 2 * shape.parameters / 3.35e12
    operations = 8 * (2 * shape.work.forward + shape.work.backward)
    assert found.seconds.compute == pytest.approx(operations / (0.378 * 989e12) + moved)


def test_without_inputs_the_time_is_unknown() -> None:
    shape = described("models:TinyGPT")
    assert not shape.timed
    found = estimate(Job(shape, 1), ONE, Option(0, 1, 1, "off", "none", 1))
    assert found.speed == "time unknown"


@pytest.mark.parametrize("factory, parameters", [("moved", 8 * 8 + 8 + 8 + 8), ("truncated", 8 * 8 + 8)])
def test_factories_that_move_and_look_are_built(factory: str, parameters: int) -> None:
    """By hand. `Module.to` swaps fake parameters only where nothing refers to them: the memo of the fake mode, a
    private name, must be empty. PEFT's `get_peft_model` does this, and `trunc_normal_` asks for values."""
    assert described(f"plan_built:{factory}").parameters == parameters


def test_a_length_that_nothing_takes_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"--seq needs a function example_inputs\(samples, sequence\)"):
        describe("plan_images:build", sequence=128)


@pytest.mark.parametrize(
    "config, total, active, embedding",
    [
        (MIXTRAL, 46.7e9, 12.9e9, 32000 * 4096),
        (QWEN_30B_A3B, 30.5e9, 3.3e9, 0),
        (LLAMA_8B, 8.03e9, 8.03e9, 128256 * 4096),
    ],
)
def test_a_token_computes_with_active_parameters(
    config: dict[str, Any], total: float, active: float, embedding: int, tmp_path: Path
) -> None:
    """Oracle: Mistral's 46.7B and 12.9B, Qwen's 30.5B and 3.3B, Meta's 8.03B; the untied input embedding is no product.

    Qwen's number is rounded to within its embedding of 0.31B.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = described(str(tmp_path))
    assert shape.transformer is not None
    assert shape.parameters == pytest.approx(total, rel=0.005)
    assert shape.parameters - shape.transformer.idle == pytest.approx(
        active - embedding, rel=0.10 if not embedding else 0.005
    )


@pytest.mark.parametrize(
    "config, parameters, gigaflops",
    [({"model_type": "vit"}, 86.4e6, 2 * 17.56), ({"model_type": "dinov2", "patch_size": 14}, 86.6e6, 2 * 23.2)],
)
def test_models_of_images_are_planned(
    config: dict[str, Any], parameters: float, gigaflops: float, tmp_path: Path
) -> None:
    """Oracle: ViT-B/16's 17.6 G multiply-adds at 224 × 224 (torchvision says 17.56), times two.

    DINOv2's 14 × 14 patches make 257 tokens of 197: 1.31 times that in its layers, by hand.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = described(str(tmp_path))
    assert shape.rate == "samples"
    assert shape.work is not None
    assert shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.work.forward == pytest.approx(gigaflops * 1e9, rel=0.03)
    assert shape.work.backward == pytest.approx(2 * shape.work.forward, rel=0.05)
