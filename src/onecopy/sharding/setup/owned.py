"""Owned: an optimizer's own step over whole parameters, each on the rank that holds it, with no message between.

The optimizer is not replaced, nor are its groups changed. A step pre-hook, which torch offers, hands its `step()` a
twin: an object of its class that shares all of its attributes but two.

    param_groups    a whole parameter that this rank owns is a plain `nn.Parameter` of full shape over the slice's
                    memory, with a plain gradient; one that another rank owns is not there. The others are as they were
    state           the same states, by those parameters; what the step makes goes to the optimizer's own afterwards

So a step makes no states for what other ranks own and does not count it, while outside of the step, for
`clip_grad_norm_`, GradScaler, `zero_grad` and checkpoints, every rank's groups are those of one process.

Where parameters rest in files, `paged.py` makes the twin, and what it sees of them are `StandIns`, bucket by bucket.

Optimizers that update each element by itself have no use for it: to them a whole parameter is a slice like any other,
which holds everything on one rank and nothing on the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from onecopy.errors import UsageError
from onecopy.sharding.setup.needs import Need, need_of
from onecopy.sharding.tensor.resting import RestingTensor
from onecopy.sharding.tensor.sliced import SlicedTensor

_STAND_IN = "_onecopy_stand_in"
_IS_TWIN = "_onecopy_owned_step"


def sees_whole(optimizer: Optimizer, *, lays_whole: bool) -> bool:
    """Whether steps of ``optimizer`` see parameters whole on one rank and not at all on the others; alike on all ranks.

    Args:
        lays_whole: some parameters of its models lie whole on one rank.

    Raises:
        UsageError: if it needs what the layout lacks, or nobody has said what it needs.
    """
    need = need_of(optimizer)
    if need.is_of_elements if need is not None else not lays_whole:
        return False
    _check(optimizer, need)
    return any(is_laid_whole(parameter, need) for parameter in _parameters(optimizer))


def owned_step(optimizer: Optimizer) -> Optimizer:
    """What is to be stepped in place of ``optimizer``, which `sees_whole`."""
    need = need_of(optimizer)
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


def write_begins(optimizer: Optimizer) -> None:
    """Say of all whole parameters that they are about to change.

    Every rank says it of the same ones, those that other ranks own among them.
    """
    need = need_of(optimizer)
    writes: dict[Any, None] = {}
    for parameter in _parameters(optimizer):
        if is_laid_whole(parameter, need) and parameter.grad is not None and parameter._on_write is not None:
            writes[parameter._on_write] = None
    for begins in writes:
        begins()


def show_gradients(optimizer: Optimizer) -> None:
    """Give stand-ins their gradients."""
    need = need_of(optimizer)
    for parameter in _parameters(optimizer):
        if is_laid_whole(parameter, need) and (seen := _seen(parameter, need)) is not None:
            seen.grad = _gradient(parameter)


def _gradient(parameter: SlicedTensor) -> Tensor | None:
    gradient: Any = parameter.grad
    return None if gradient is None else as_whole(gradient.local.to(parameter.dtype), parameter)


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


def elements_in_memory(state: Any, parameter: RestingTensor, need: Need | None) -> Tensor | None:
    """This rank's elements of a state that is to rest where ``parameter`` does and is in memory; None of all others.

    Of a whole parameter these are plain tensors of its shape; what has another shape, or is a tensor of another class,
    stays in memory.
    """
    if isinstance(state, SlicedTensor):
        is_its = parameter.slicing.matches(state.slicing) and not isinstance(state, RestingTensor)
        return state.local if is_its else None
    if not is_laid_whole(parameter, need) or type(state) is not Tensor or not state.dim():
        return None
    return parameter.slicing.cut(state) if state.shape == parameter.shape else None


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
        made = _new_stand_in(parameter, local)
        setattr(parameter, _STAND_IN, made)
    return made


def _new_stand_in(parameter: SlicedTensor, local: Tensor) -> nn.Parameter:
    made = nn.Parameter(as_whole(local, parameter), parameter.requires_grad)
    kinds = (SlicedTensor, RestingTensor)
    own = {_STAND_IN, *(name for kind in kinds for name in (*vars(kind), *kind.__annotations__))}
    for name, value in vars(parameter).items():
        # What users and other libraries have put there.
        if name not in own:
            setattr(made, name, value)
    return made


class StandIns:
    """Whole parameters that rest in a file, as a step sees them while their pages are at hand.

    Until `end`, the optimizer has their states by the stand-ins.

    Args:
        parameters: of the pages that are at hand, those that ``optimizer`` holds.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[RestingTensor]) -> None:
        self._optimizer = optimizer
        self._made: dict[RestingTensor, nn.Parameter] = {}
        self._writes: dict[RestingTensor, int] = {}
        self._shown: dict[RestingTensor, dict[str, tuple[Tensor, RestingTensor]]] = {}
        need = need_of(optimizer)
        for parameter in parameters:
            if not is_laid_whole(parameter, need) or not parameter.slicing.numel or parameter.grad is None:
                continue
            made = self._made[parameter] = _new_stand_in(parameter, parameter.local)
            made.grad = gradient = _gradient(parameter)
            self._writes[parameter] = gradient._version if gradient is not None else 0
            if parameter in optimizer.state:
                optimizer.state[made] = self._whole(parameter, optimizer.state.pop(parameter))

    def _whole(self, parameter: RestingTensor, states: Any) -> Any:
        """States as a step over the whole sees them."""
        shown = self._shown[parameter] = {}
        for name, value in list(states.items()) if isinstance(states, dict) else ():
            if isinstance(value, SlicedTensor):
                states[name] = as_whole(value.local, value)
            if isinstance(value, RestingTensor):
                shown[name] = states[name], value
        return states

    def seen(self, parameters: Iterable[Any]) -> list[Any]:
        """What the step sees of ``parameters``."""
        need = need_of(self._optimizer)
        return [
            self._made.get(parameter, parameter)
            for parameter in parameters
            if parameter in self._made or not is_laid_whole(parameter, need)
        ]

    def end(self) -> None:
        """Have what the step has changed written back, and the optimizer's states by its parameters again."""
        for parameter, made in self._made.items():
            parameter.page.is_changed = True
            gradient: Any = parameter.grad
            if isinstance(gradient, RestingTensor) and made.grad is not None:
                gradient.page.is_changed |= made.grad._version != self._writes[parameter]
            if made not in self._optimizer.state:
                continue
            states = self._optimizer.state[parameter] = self._optimizer.state.pop(made)
            for name, (view, resting) in self._shown.get(parameter, {}).items():
                if isinstance(states, dict) and states.get(name) is view:
                    states[name] = resting
                    resting.page.is_changed = True
        self._made.clear()


def as_whole(local: Tensor, like: SlicedTensor) -> Tensor:
    """All elements of a whole parameter in its shape, over the memory of ``local``."""
    slicing = like.slicing
    return local.detach().as_strided(slicing.shape, slicing.strides, local.storage_offset())


def _whole_states(states: Any) -> Any:
    """States as a step over the whole sees them: those that came as slices, out of a checkpoint, are made plain."""
    if isinstance(states, dict):
        for name, value in states.items():
            if isinstance(value, SlicedTensor):
                states[name] = as_whole(value.local, value)
    return states
