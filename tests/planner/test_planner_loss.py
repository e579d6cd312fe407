"""What a language model's loss holds. Oracle: tensors alive in a real run of transformers' loss, counted one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.alive import Alive
from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.formulas.activations import logits_bytes
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.shape import Shape, Transformer, Unit

transformers: Any = pytest.importorskip("transformers")

WORDS, LENGTH, SAMPLES = 30_000, 32, 2


@pytest.mark.parametrize("dtype, element_bytes", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_loss_holds_14_bytes_a_logit_at_the_height_of_backward(dtype: torch.dtype, element_bytes: int) -> None:
    """The loss alone, on logits that the model's output keeps: all else is too small to count."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    # No leaf, whose gradient would be kept.
    logits = torch.zeros(SAMPLES, LENGTH, 1, dtype=dtype, requires_grad=True).expand(-1, -1, WORDS).clone()
    labels = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    with Alive(logits) as alive:
        ForCausalLMLoss(logits, labels, WORDS).backward()
    assert logits_bytes(SAMPLES, LENGTH, WORDS, element_bytes) == pytest.approx(logits.nbytes + alive.most, rel=0.01)


def test_qwens_logits_at_32k_tokens_do_not_fit() -> None:
    """By hand: 32,768 × 152,064 logits of 14 bytes are 69.8 GB, where 6 bytes would be 29.9."""
    sizes = Transformer(28, 3584, 28, 152_064, 28)
    shape = Shape("head", (Unit("", (1000,)),), sizes)
    found = estimate(Job(shape, 32_768), Machine(8, gpu_of("h100")), Option(3, 1, 1, "units", "none", 8))
    assert found.peaks["backward"]["logits"] == pytest.approx(69.8e9, rel=0.001)
