"""Compiled: what `torch.compile` must not trace. A graph ends at each such hook, and the next one begins behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_REASON: Final = (
    "onecopy gathers a unit's parameters before its forward and releases them after it: compile each block with "
    "fullgraph=True (`for block in model.blocks: block.compile(fullgraph=True)`), or the model without fullgraph=True"
)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which runs between two graphs; where a whole model must be one graph, the compiler says why not."""
    outside: Callable[..., Any] = torch.compiler.disable(hook, reason=_REASON)
    return outside
