"""Redirect: a method of a module run as its forward is, so that the hooks around forward run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def through_forward(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``method(*args, **kwargs)`` from inside a call of ``module``, which the method may call itself."""
    before = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before

    def once(*own: Any, **named: Any) -> Any:
        restore()
        return method(*own, **named)

    module.__dict__["forward"] = once
    try:
        return module(*args, **kwargs)
    finally:
        restore()
