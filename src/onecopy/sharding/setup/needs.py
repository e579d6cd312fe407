"""Needs: what an optimizer's update of a parameter takes, by its class. `needs_whole` adds a class.

=========  ==================================================  ====================================================
elements   each element by itself (AdamW, SGD, Lion)           slices that cut parameters anywhere
norms      and norms of whole tensors (LARS, LAMB)             the same: norms are taken over all ranks
whole      a whole parameter by itself (Muon, Adafactor)       a layout in which it lies whole on one rank
model      all parameters at once (LBFGS)                      is refused
=========  ==================================================  ====================================================

An optimizer that is not known steps over slices as it will, and whatever a slice cannot answer is an error. Over whole
parameters it would see some of them and not miss the others, so it must be known before it steps over any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeVar

from torch import Tensor, optim
from torch.optim.optimizer import Optimizer

from onecopy.sharding.bucket.owners import cost_of_elements, cost_of_newton_schulz

OptimizerT = TypeVar("OptimizerT", bound=type[Optimizer])

Cost = Callable[[Sequence[int]], float]


@dataclass(frozen=True)
class Need:
    """What updates by one class of optimizers take.

    Attributes:
        requires: which parameters must be whole.
        prefers: which are laid whole where the layout is chosen for it.
        cost: operations of one parameter's update, by shape; roughly, for comparing parameters with each other.
        needs_model: it needs all parameters at once.
    """

    requires: Callable[[Tensor], bool]
    prefers: Callable[[Tensor], bool]
    cost: Cost
    needs_model: bool = False

    @property
    def is_of_elements(self) -> bool:
        """Whether no parameter need be whole."""
        return self.requires is _none


def _none(_: Tensor) -> bool:
    return False


def _every(_: Tensor) -> bool:
    return True


def _matrices(parameter: Tensor) -> bool:
    return parameter.dim() > 1


def cost_of_eigenbases(shape: Sequence[int]) -> float:
    """Of SOAP's and Shampoo's: four products with a square matrix for each dimension."""
    return cost_of_elements(shape) + 8.0 * prod(shape) * sum(side for side in shape if len(shape) > 1)


_ELEMENTS: Final = Need(_none, _none, cost_of_elements)
_MODEL: Final = Need(_every, _every, cost_of_elements, needs_model=True)
_WHOLE: Final = Need(_every, _every, cost_of_elements)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_OF_ELEMENTS: Final = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
)
_NEEDS: Final[dict[str, Need]] = {
    **{_name(kind): _ELEMENTS for kind in _OF_ELEMENTS},
    _name(optim.Muon): Need(_every, _every, cost_of_newton_schulz),
    # Of one dimension it needs norms alone, each of which is a message.
    _name(optim.Adafactor): Need(_matrices, _every, cost_of_elements),
    # It writes through boolean indices.
    _name(optim.Rprop): _WHOLE,
    _name(optim.LBFGS): _MODEL,
    "pytorch_optimizer.optimizer.soap.SOAP": Need(_every, _every, cost_of_eigenbases),
    "pytorch_optimizer.optimizer.shampoo.Shampoo": Need(_every, _every, cost_of_eigenbases),
    "pytorch_optimizer.optimizer.shampoo.ScalableShampoo": Need(_every, _every, cost_of_eigenbases),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": _ELEMENTS,
    "schedulefree.sgd_schedulefree.SGDScheduleFree": _ELEMENTS,
    # Elements share a scale by blocks, which slices would cut.
    "torchao.optim.adam.Adam8bit": _WHOLE,
    "torchao.optim.adam.AdamW8bit": _WHOLE,
    "torchao.optim.adam.Adam4bit": _WHOLE,
    "torchao.optim.adam.AdamW4bit": _WHOLE,
}
"""By the class's module and name: packages of others are not imported for it."""


def needs_whole(
    kind: OptimizerT, *, requires: Callable[[Tensor], bool] | None = None, cost: Cost | None = None
) -> OptimizerT:
    """Declare that a class of optimizers updates each parameter by itself and needs it whole. Also a decorator.

    "By itself" means that the update of a parameter depends only on its own values, gradient and states, and on the
    settings of its group. An optimizer that takes a norm over all gradients, or a step size from all of them
    (Prodigy), does not qualify, because each rank's step sees only the whole parameters that the rank owns. Call
    `clip_grad_norm_` before the step instead.

    Args:
        requires: a function that says of a parameter (full shape, dtype) whether it must be whole. None: all must.
        cost: a function from a parameter's shape to the number of operations of its update. The parameters are spread
            over ranks by this cost. None: the cost is proportional to the number of elements.

    Returns:
        ``kind``.
    """
    requires = requires or _every
    _NEEDS[_name(kind)] = Need(requires, requires, cost or cost_of_elements)
    return kind


def need_of(optimizer: Optimizer) -> Need | None:
    """What ``optimizer`` needs; None if its class, or the class that its step comes from, is not known."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if (need := _NEEDS.get(_name(base))) is not None:
            return need if _steps_as(kind, base) else None
    return None


def _steps_as(kind: type, base: type) -> bool:
    """Whether ``kind`` has the step of ``base``, which torch wraps when it first meets either."""
    own, known = (inspect.unwrap(getattr(one, "step", one)) for one in (kind, base))
    return own is known
