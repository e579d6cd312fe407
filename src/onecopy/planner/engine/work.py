"""Work: floating-point operations of any module's forward and backward, counted by torch on fake tensors.

torch's `FlopCounterMode` knows matrix products, convolutions and the attention kernels of GPUs; the one that the CPU
has instead is added here.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from onecopy.planner.engine.fake import AnyValues, fake_tensors
from onecopy.planner.engine.simulate import Build, MakeBatch, call, loss_of
from onecopy.planner.model.shape import Work

aten = torch.ops.aten
Lengths = tuple[int, ...]


def count_work(build: Build, batch: MakeBatch) -> Work:
    """Operations of one batch of one sample.

    Args:
        build: makes the model; needs no memory.
        batch: makes the model's keyword or positional arguments for one sample.
    """
    with fake_tensors():
        with AnyValues():
            model = build()
        inputs = batch()
        with _counter() as forward:
            loss = loss_of(call(model, inputs))
        with _counter() as backward:
            if loss.requires_grad:
                loss.backward()
        return Work(float(forward.get_total_flops()), float(backward.get_total_flops()), _tokens(inputs))


def _counter() -> FlopCounterMode:
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        },
    )


def _attention(query: Lengths, key: Lengths, *_: Any, **__: Any) -> int:
    """Two products, of queries with keys and of what comes out with values."""
    return 4 * prod(query) * key[-2]


def _attention_backward(_: Any, query: Lengths, key: Lengths, *__: Any, **___: Any) -> int:
    """Four products, and the first one again, as torch counts kernels that keep no scores."""
    return 10 * prod(query) * key[-2]


def _tokens(inputs: Any) -> int | None:
    """Tokens of a sample: the length of the first matrix of whole numbers; None where there is none."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in (torch.int32, torch.int64):
            return leaf.shape[1]
    return None
