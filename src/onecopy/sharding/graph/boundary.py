"""Where a unit begins in the autograd graph, and what autograd is doing now.

A unit's inputs pass through `mark_inputs`, an identity whose backward runs once all of the unit's backward has run:
autograd takes nodes in the reverse order of their creation, and this node is the unit's first. Counting arrived
gradients instead would release frozen weights that are still needed for the gradients of inputs.

Private torch names, read in torch 2.13 and tested in tests/house/test_private_apis.py:
`torch._C._current_graph_task_id` (-1 outside backward), `torch.autograd.Variable._execution_engine.queue_callback`
(runs at the end of backward) and `torch._C._functorch.peek_interpreter_stack` (None outside of torch.func's
transforms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecopy.sharding.graph.tensors import Edits, find_tensors, replace_tensors


def mark_inputs(on_backward: Callable[[], None], args: Any, kwargs: Any, edits: Edits) -> tuple[Any, Any, bool]:
    """Route the tensors in a unit's inputs that require a gradient through an identity.

    Args:
        on_backward: called when the gradients of all those inputs have been computed.
        edits: takes down what is replaced in lists, dicts and dataclasses of the caller's.

    Returns:
        ``args`` and ``kwargs`` with those tensors replaced, and whether there were any.
    """
    inputs = {id(tensor): tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad}
    if not inputs:
        return args, kwargs, False
    marked: tuple[Tensor, ...] = _Identity.apply(on_backward, *inputs.values())  # type: ignore[no-untyped-call]
    replacement = dict(zip(inputs, marked, strict=True))

    def change(tensor: Tensor) -> Tensor:
        return replacement.get(id(tensor), tensor)

    return replace_tensors(args, change, edits), replace_tensors(kwargs, change, edits), True


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, jvp, grad, …) is running in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Run ``action`` when the backward pass that is running now has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.on_backward = on_backward
        ctx.set_materialize_grads(False)
        # Detached aliases, not the inputs themselves: those would come back as views of a custom function, which
        # autograd lets no unit modify in place. The alias shares memory and version counter, so a wrong
        # modification is still found.
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.on_backward()
        return (None, *gradients)
