"""Entrances: a model that is only a wrapper is entered through what it wraps too, as PEFT's `generate` does.

A wrapper has no parameters of its own and one child that has all of them. Its method may call that child and go around
its own forward; then the child's call is the model's forward, and the root's parameters are whole in it. So it is with
the parts of a model that a training loop calls one by one (a generator and its discriminator in a LightningModule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from onecopy.sharding.engine.unit import Unit
from onecopy.sharding.graph.compiled import untraced

Hook = Callable[..., Any]


def open_entrances(
    modules: Iterable[nn.Module], root: Unit, before: Hook, after: Hook, forget_interrupted: Callable[[], None]
) -> None:
    """Have calls of ``modules`` announced as calls of the root itself, where they are the outermost.

    Args:
        modules: inside the root's scope.
        root: the root unit.
        before, after: its hooks, called with it and what torch calls hooks with.
        forget_interrupted: forgets forwards that were cut off, which would seem to be running.
    """
    for module in modules:
        # Whether each call of the module that is running is the outermost one.
        outermost: list[bool] = []
        enter = untraced(partial(_enter, root, before, forget_interrupted, outermost))
        leave = untraced(partial(_leave, root, after, outermost))
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)


def _enter(root: Unit, before: Hook, forget_interrupted: Callable[[], None], outermost: list[bool], *call: Any) -> Any:
    forget_interrupted()
    outermost.append(not root.running)
    return before(root, *call) if outermost[-1] else None


def _leave(root: Unit, after: Hook, outermost: list[bool], *call: Any) -> Any:
    return after(root, *call) if outermost and outermost.pop() else None


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Its children that can be called and have parameters; of a list or dict of modules, those inside it."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from parts_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


def wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """What the module wraps, what that wraps, and so on."""
    while not any(parameter is not None for parameter in module._parameters.values()):
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(children) != 1 or type(children[0]).forward is nn.Module.forward:
            return
        (module,) = children
        yield module
