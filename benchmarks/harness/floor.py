"""The floor: what every system has to compute, with nothing sent, gathered, reduced or copied.

Each rank trains a plain replica on its own batches, and its optimizer updates its 1/N of the trained elements, as
ZeRO's do from stage 1 on. Replicas drift apart at once and nobody has the new model: this is no way to train, but what
remains of a step when all that ranks do for each other is free. A target below it is out of reach on that machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def adamw_on_share(parameters: Iterable[nn.Parameter], rank: int, num_ranks: int) -> torch.optim.Optimizer:
    """Fused AdamW over one rank's share of the trained elements, in place; its step lets all gradients go.

    The share is the ``rank``-th 1/N of all trained elements laid end to end, so that no more than two parameters are
    cut: the fewest tensors that an optimizer can be given without a copy.

    Args:
        parameters: contiguous; those that are not trained are passed over.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in trained)
    first, last = total * rank // num_ranks, total * (rank + 1) // num_ranks
    own: list[Tensor] = []
    cut: list[tuple[nn.Parameter, slice, Tensor]] = []
    offset = 0
    for parameter in trained:
        begin, end = max(first - offset, 0), min(last - offset, parameter.numel())
        if end - begin == parameter.numel():
            own.append(parameter)
        elif begin < end:
            own.append(parameter.detach().view(-1)[begin:end])
            cut.append((parameter, slice(begin, end), own[-1]))
        offset += parameter.numel()
    optimizer = torch.optim.AdamW(own, fused=True)

    def hand_over(*_: object) -> None:
        for parameter, part, piece in cut:
            assert parameter.grad is not None
            piece.grad = parameter.grad.view(-1)[part]

    def let_go(*_: object) -> None:
        for parameter in trained:
            parameter.grad = None

    optimizer.register_step_pre_hook(hand_over)
    optimizer.register_step_post_hook(let_go)
    return optimizer
