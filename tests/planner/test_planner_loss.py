"""What a language model's loss holds. Oracle: tensors alive in a real run of transformers' loss, counted one by one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.formulas.activations import logits_bytes
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.shape import Shape, Transformer, Unit

transformers: Any = pytest.importorskip("transformers")

WORDS, LENGTH, SAMPLES = 30_000, 32, 2


class Alive(TorchDispatchMode):
    """Bytes of ``given`` and of all storages that operations have made and that are still there; the most of them."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = given.untyped_storage().nbytes()
        self.known = {given.untyped_storage()._cdata}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("dtype, element_bytes", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_loss_holds_14_bytes_a_logit_at_the_height_of_backward(dtype: torch.dtype, element_bytes: int) -> None:
    """The loss alone, on logits that the model's output keeps: all else is too small to count."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    # No leaf, whose gradient would be kept.
    logits = torch.zeros(SAMPLES, LENGTH, 1, dtype=dtype, requires_grad=True).expand(-1, -1, WORDS).clone()
    labels = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    with Alive(logits) as alive:
        ForCausalLMLoss(logits, labels, WORDS).backward()
    assert logits_bytes(SAMPLES, LENGTH, WORDS, element_bytes) == pytest.approx(alive.most, rel=0.01)


def test_qwens_logits_at_32k_tokens_do_not_fit() -> None:
    """By hand: 32,768 × 152,064 logits of 14 bytes are 69.8 GB, where 6 bytes would be 29.9."""
    sizes = Transformer(28, 3584, 28, 152_064, 28)
    shape = Shape("head", (Unit("", (1000,)),), sizes)
    found = estimate(Job(shape, 32_768), Machine(8, gpu_of("h100")), Option(3, 1, 1, "units", "none", 8))
    assert found.peaks["backward"]["logits"] == pytest.approx(69.8e9, rel=0.001)
