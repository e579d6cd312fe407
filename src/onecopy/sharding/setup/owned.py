"""Owned: an optimizer's own step over whole parameters, each on the rank that holds it, with no message between.

The optimizer is not replaced, nor are its groups changed. A step pre-hook, which torch offers, hands its `step()` a
twin: an object of its class that shares all of its attributes but two.

    param_groups    a whole parameter that this rank owns is a plain `nn.Parameter` of full shape over the slice's
                    memory, with a plain gradient; one that another rank owns is not there. The others are as they were
    state           the same states, by those parameters; what the step makes goes to the optimizer's own afterwards

So a step makes no states for what other ranks own and does not count it, while outside of the step, for
`clip_grad_norm_`, GradScaler, `zero_grad` and checkpoints, every rank's groups are those of one process.

Optimizers that update each element by itself have no use for it: to them a whole parameter is a slice like any other,
which holds everything on one rank and nothing on the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from onecopy.errors import UsageError
from onecopy.sharding.setup.needs import Need, need_of
from onecopy.sharding.tensor.sliced import SlicedTensor

_STAND_IN = "_onecopy_stand_in"
_IS_TWIN = "_onecopy_owned_step"


def owned_step(optimizer: Optimizer, *, lays_whole: bool) -> Optimizer:
    """What is to be stepped in place of ``optimizer``, itself where it needs and holds no whole parameters.

    Args:
        lays_whole: some parameters of its models lie whole on one rank.

    Raises:
        UsageError: if it needs what the layout lacks, or nobody has said what it needs.
    """
    need = need_of(optimizer)
    if need.is_of_elements if need is not None else not lays_whole:
        return optimizer
    _check(optimizer, need)
    if not any(is_laid_whole(parameter, need) for parameter in _parameters(optimizer)):
        return optimizer
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, **{_IS_TWIN: True})
    twin.param_groups = [
        {**group, "params": [own for p in group["params"] if (own := _seen(p, need)) is not None]}
        for group in optimizer.param_groups
    ]
    states: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.items():
        if (seen := _seen(key, need)) is not None:
            states[seen] = _whole_states(value) if seen is not key else value
    twin.state = states
    return twin


def is_owned_step(stepped: object) -> bool:
    """Whether ``stepped`` is a twin."""
    return isinstance(stepped, Optimizer) and _IS_TWIN in vars(stepped)


def show_gradients(optimizer: Optimizer) -> None:
    """Give stand-ins their gradients, and say of all whole parameters that they are about to change.

    Every rank says it of the same ones, those that other ranks own among them.
    """
    need = need_of(optimizer)
    writes: dict[Any, None] = {}
    for parameter in _parameters(optimizer):
        if not is_laid_whole(parameter, need):
            continue
        gradient = parameter.grad
        if gradient is not None and parameter._on_write is not None:
            writes[parameter._on_write] = None
        if (seen := _seen(parameter, need)) is not None:
            seen.grad = None if gradient is None else _view(gradient.local.to(parameter.dtype), parameter)
    for write_begins in writes:
        write_begins()


def end_owned_step(optimizer: Optimizer, twin: Optimizer) -> None:
    """Take over what the step of ``twin`` has changed."""
    need = need_of(optimizer)
    real = {seen: p for p in _parameters(optimizer) if (seen := _seen(p, need)) is not None and seen is not p}
    for seen in real:
        seen.grad = None
    for group, part in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update({name: value for name, value in part.items() if name != "params"})
    optimizer.state.clear()
    optimizer.state.update({real.get(key, key): value for key, value in twin.state.items()})
    for name, value in vars(twin).items():
        if name not in ("param_groups", "state", _IS_TWIN) and value is not vars(optimizer).get(name):
            setattr(optimizer, name, value)


def _check(optimizer: Optimizer, need: Need | None) -> None:
    kind = type(optimizer).__name__
    for parameter in _parameters(optimizer):
        if not isinstance(parameter, SlicedTensor):
            continue
        slicing = parameter.slicing
        if need is None:
            if slicing.is_whole:
                raise UsageError(
                    f"{kind} holds {slicing.name!r}, which lies whole on one rank, and onecopy does not know what "
                    f"{kind} needs: if its step updates each parameter by itself, with no norm or product over all of "
                    f"them, say so once, onecopy.needs_whole({kind})."
                )
        elif need.needs_model:
            raise UsageError(
                f"{kind} needs all parameters at once in its step, of which each rank holds a part ({slicing.name!r} "
                f"is one): take an optimizer that updates each parameter by itself (AdamW, Muon, SOAP)."
            )
        elif need.requires(parameter) and not is_laid_whole(parameter, need):
            raise UsageError(
                f"{kind} needs {slicing.name!r} {tuple(parameter.shape)} whole, and this layout cuts it: pass "
                f"onecopy.shard(..., optimizer=optimizer) one that was made before, or say which parameters lie whole "
                f"on one rank, onecopy.shard(..., whole=lambda name, p: p.ndim == {parameter.dim()})."
            )


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def is_laid_whole(parameter: Any, need: Need | None) -> bool:
    """Whether a step of what has ``need`` sees ``parameter`` whole on one rank, and not at all on the others.

    Where nothing is cut every rank holds all of it, and a step sees that whole if it needs to.
    """
    if need is None or need.is_of_elements or not isinstance(parameter, SlicedTensor):
        return False
    slicing = parameter.slicing
    alone = all(axis.size == 1 for axis in slicing.spread)
    return slicing.is_whole or (alone and need.requires(parameter) and slicing.numel > 0)


def _seen(parameter: Any, need: Need | None) -> Any:
    """What the step sees of ``parameter``: a stand-in, itself, or None: nothing."""
    if not isinstance(parameter, SlicedTensor) or not is_laid_whole(parameter, need):
        return parameter
    return _stand_in(parameter) if parameter.slicing.numel else None


def _stand_in(parameter: SlicedTensor) -> nn.Parameter:
    """The whole of an owned parameter, over its memory; one object as long as that stays."""
    made: nn.Parameter | None = getattr(parameter, _STAND_IN, None)
    local = parameter.local
    if made is None or made.data_ptr() != local.data_ptr():
        made = nn.Parameter(_view(local, parameter), parameter.requires_grad)
        for name, value in vars(parameter).items():
            # What users and other libraries have put there.
            if name not in vars(SlicedTensor) and name not in SlicedTensor.__annotations__ and name != _STAND_IN:
                setattr(made, name, value)
        setattr(parameter, _STAND_IN, made)
    return made


def _view(local: Tensor, like: SlicedTensor) -> Tensor:
    slicing = like.slicing
    return local.detach().as_strided(slicing.shape, slicing.strides, local.storage_offset())


def _whole_states(states: Any) -> Any:
    """States as a step over the whole sees them: those that came as slices, out of a checkpoint, are made plain."""
    if isinstance(states, dict):
        for name, value in states.items():
            if isinstance(value, SlicedTensor):
                states[name] = _view(value.local, value)
    return states
