"""Which elements of an operation's arguments meet the slice of another, and the error where that cannot be said.

Every rule for an operation on SlicedTensors starts here. The first sliced argument says which elements are acted on;
each other tensor among the arguments holds the same ones, or is whole and is cut, or is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from onecopy.errors import NeedsWholeError
from onecopy.sharding.tensor.files import describe_difference, is_saved
from onecopy.sharding.tensor.sliced import SlicedTensor, Slicing


def part(argument: Any, like: Slicing, func: Any) -> Any:
    """What of ``argument`` meets the elements of ``like``: 1-D and of their number, or one element that meets all.

    Raises:
        NeedsWholeError: if it is sliced in another way, or of a shape that would be broadcast.
    """
    if isinstance(argument, SlicedTensor):
        if not like.matches(argument.slicing):
            if is_saved(like) or is_saved(argument.slicing):
                raise NeedsWholeError(describe_difference(*sorted((like, argument.slicing), key=is_saved)))
            raise NeedsWholeError(
                f"{operation_name(func)} of {like.name!r} {tuple(like.shape)} and {argument.slicing.name!r} "
                f"{tuple(argument.shape)} would mix different elements, because the two are cut differently: use it "
                "inside `with onecopy.gathered(...)`."
            )
        return argument.local
    if not isinstance(argument, Tensor):
        return argument
    if argument.shape == like.shape:
        return like.cut(argument)
    if argument.dim() == 0:
        return argument
    if argument.numel() == 1 and argument.dim() <= len(like.shape):
        return argument.reshape(1)
    raise NeedsWholeError(
        f"{operation_name(func)} would broadcast shape {tuple(argument.shape)} to the sharded {like.name!r} "
        f"{tuple(like.shape)}, which needs the whole parameter: use it inside `with onecopy.gathered(...)`."
    )


def first_sliced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedTensor:
    """The first SlicedTensor among an operation's arguments, lists among them."""
    for argument in (*args, *kwargs.values()):
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, SlicedTensor):
                return item
    raise AssertionError("dispatched without a SlicedTensor")


def needs_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """The rule for operations that a slice cannot answer."""
    found = first_sliced(args, kwargs)
    raise NeedsWholeError(
        f"{operation_name(func)} needs the whole parameter {found.slicing.name!r} {tuple(found.shape)}, of which this "
        f"rank holds {found.slicing.numel} elements. Use it inside `with onecopy.gathered(model):`, or call the model "
        f"(a unit's parameters are whole while its forward runs). An optimizer's step has it whole, on one rank, with "
        f"onecopy.shard(..., whole=[{found.slicing.name!r}, ...]).{advice(found)}"
    )


def advice(parameter: SlicedTensor) -> str:
    """What the engine that runs the model of ``parameter`` says to its use."""
    engine = parameter._engine() if parameter._engine is not None else None
    return str(engine.advise(parameter.slicing.name)) if engine is not None else ""


def refuse_write(func: Any, sliced: Slicing, target: Any) -> NoReturn:
    """Of a plain tensor into which an operation would write a slice."""
    raise NeedsWholeError(
        f"{operation_name(func)} would write this rank's elements of {sliced.name!r} {tuple(sliced.shape)} into a "
        f"whole tensor {tuple(target.shape)}. Make the target with torch.zeros_like of the parameter, or use the "
        "operation inside `with onecopy.gathered(...)`. For a moving average of the parameters, call onecopy.ema."
    )


def written(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that the operation writes to."""
    return tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def writes_out(func: Any) -> bool:
    """Whether the operation writes to `out=`, whose shape says nothing about that of the result."""
    return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def written_values(func: Any, positions: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments at ``positions`` of the schema, wherever they were passed."""
    names = [argument.name for argument in func._schema.arguments]
    return [args[position] if position < len(args) else kwargs.get(names[position]) for position in positions]


def operation_name(func: Any) -> str:
    """As users write it."""
    return str(func._schema.name).removeprefix("aten::")
