"""Every ATen operation on SlicedTensors is right or refused. Oracle: the same call on whole plain tensors.

The table is generated from the operators that the installed torch registers: each is called with arguments made up from
its schema, in every combination of kinds. A kind says what stands at an operation's tensor arguments beside a slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.errors import UsageError
from onecopy.sharding.tensor.narrow import NarrowGradient
from onecopy.sharding.tensor.sliced import SlicedTensor

SHAPES = {"matrix": (5, 7), "vector": (64,), "scalar": ()}
REFUSED = "refused"
AS_TORCH = "torch raises as well"
CASES = (
    ("matrix", torch.float32),
    ("matrix", torch.int64),
    ("matrix", torch.bool),
    ("vector", torch.float32),
    ("scalar", torch.float32),
    ("scalar", torch.int64),
)


class Shapes(nn.Module):
    """A matrix cut within a row, a vector cut in halves that broadcast with plain halves, and a number."""

    def __init__(self, first: int) -> None:
        super().__init__()
        # Moves the cuts: two models with other sizes of it hold other elements of the rest.
        self.first = nn.Parameter(torch.zeros(first))
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@cache
def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(shape, generator=generator) * 0.8 + 0.1
    return numbers if dtype.is_floating_point else (numbers * 5 + 1).to(dtype) if dtype != torch.bool else numbers > 0.5


@dataclass
class Argument:
    """A tensor argument, as the call under test gets it and as the oracle does."""

    given: Tensor
    whole: Tensor


class Maker:
    """Makes arguments of each kind."""

    def __init__(self) -> None:
        self._models = [onecopy.shard(Shapes(first), 3) for first in (8, 24)]
        self._seeds = itertools.count()

    def __call__(self, kind: str, shape: str, dtype: torch.dtype) -> Argument:
        # Few enough to be kept, and arguments that stand beside each other differ.
        whole = _values(SHAPES[shape], dtype, next(self._seeds) % 7).clone()
        if kind == "narrow":
            whole = whole.bfloat16().to(dtype)
            parameter: Any = getattr(self._models[0], shape)
            narrow = parameter.slicing.cut(whole).bfloat16()
            return Argument(NarrowGradient(narrow, parameter.slicing, dtype=dtype), whole)
        if kind in ("slice", "other layout"):
            like: Any = getattr(self._models[kind == "other layout"], shape)
            return Argument(SlicedTensor(like.slicing.cut(whole).clone(), like.slicing), whole)
        if kind == "broadcast":
            whole = _values({"matrix": (7,), "vector": (32,), "scalar": (3,)}[shape], dtype, 1).clone()
        elif kind == "number":
            whole = _values((), dtype, 2).clone()
        elif kind == "one element":
            whole = _values((1,), torch.float64 if dtype.is_floating_point else dtype, 3).clone()
        return Argument(whole.clone(), whole)


COMBINATIONS: dict[str, Callable[[int], str]] = {
    "slices": lambda place: "slice",
    "slice, plain": lambda place: "slice" if place == 0 else "plain",
    "plain, slice": lambda place: "plain" if place == 0 else "slice",
    "slice, other layout": lambda place: "slice" if place == 0 else "other layout",
    "slice, broadcast": lambda place: "slice" if place == 0 else "broadcast",
    "broadcast, slice": lambda place: "broadcast" if place == 0 else "slice",
    "narrow": lambda place: "narrow",
    "slice, number": lambda place: "slice" if place == 0 else "number",
    "slice, one element": lambda place: "slice" if place == 0 else "one element",
    "narrow, slice": lambda place: "narrow" if place == 0 else "slice",
    "slice, narrow": lambda place: "slice" if place == 0 else "narrow",
    "narrow, plain": lambda place: "narrow" if place == 0 else "plain",
}


def _operators(prefix: str = "") -> Iterator[Any]:
    """Of torch 2.13 some 3000."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::" + prefix):
            packet, _, variant = name.removeprefix("aten::").partition(".")
            try:
                yield getattr(getattr(torch.ops.aten, packet), variant or "default")
            except (AttributeError, RuntimeError):
                continue


def _made_up(argument: Any) -> Any:
    """A value for an argument that is no tensor."""
    kind = str(argument.type)
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    if "List[int]" in kind or "List[SymInt]" in kind:
        return [0]
    if kind in ("int", "SymInt"):
        return 0 if "dim" in argument.name else 1
    return {"number": 2, "Scalar": 2, "float": 0.5, "bool": False, "str": "none", "List[bool]": [True]}.get(kind, 1)


class Call:
    """One call of an operator with one combination of kinds."""

    def __init__(self, operator: Any, make: Callable[[int, bool], Argument]) -> None:
        self.operator = operator
        self.tensors: list[Argument] = []
        self.given: dict[str, Any] = {}
        self.whole: dict[str, Any] = {}
        for argument in operator._schema.arguments:
            kind = str(argument.type)
            written = argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only
            if kind == "Tensor" or (kind == "Optional[Tensor]" and not argument.kwarg_only):
                made = make(len(self.tensors), written)
                self.tensors.append(made)
                self.given[argument.name], self.whole[argument.name] = made.given, made.whole
            elif kind == "List[Tensor]":
                row = [make(len(self.tensors) + place, written) for place in range(2)]
                self.tensors += row
                self.given[argument.name] = [r.given for r in row]
                self.whole[argument.name] = [r.whole for r in row]
            else:
                self.given[argument.name] = self.whole[argument.name] = _made_up(argument)

    def fault(self) -> str | None:
        """What is wrong with the answer, None if it is right, `REFUSED` or `AS_TORCH` if there is none."""
        if not any(isinstance(t.given, SlicedTensor) for t in self.tensors):
            return REFUSED
        found, error = _attempt(self.operator, self.given)
        # The second: kernels that torch calls itself, without asking a tensor subclass, find no memory.
        if isinstance(error, UsageError) or "its data is not allocated yet" in str(error):
            return REFUSED
        expected, why = _attempt(self.operator, self.whole)
        if "ZeroDivisionError" in str(why):
            # Of the values that each rank holds.
            return AS_TORCH
        if why is not None:
            return AS_TORCH if error is not None else f"answered, where torch raises {why!r:.80}"
        if error is not None:
            return f"raised {error!r:.200}"
        if problem := _difference(found, expected):
            return problem
        problems = [_difference(t.given, t.whole) for t in self.tensors]
        return next((f"left an argument wrong: {p}" for p in problems if p), None)


def _attempt(operator: Any, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    positional = [arguments[a.name] for a in operator._schema.arguments if not a.kwarg_only]
    named = {a.name: arguments[a.name] for a in operator._schema.arguments if a.kwarg_only}
    try:
        with torch.no_grad():
            return operator(*positional, **named), None
    except Exception as error:
        return None, error


def _difference(found: Any, expected: Any) -> str | None:
    if isinstance(expected, list | tuple):
        pairs = itertools.zip_longest(found, expected)
        return next((problem for f, e in pairs if (problem := _difference(f, e))), None)
    if not isinstance(expected, Tensor):
        return None if found == expected else f"{found!r} for {expected!r}"
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.layout) != (
        expected.shape,
        expected.dtype,
        torch.strided,
    ):
        return f"{_look(found)} for {_look(expected)}"
    values = found
    if isinstance(found, NarrowGradient):
        values, expected = found.local, found.slicing.cut(expected).to(found.local.dtype)
    elif isinstance(found, SlicedTensor):
        values, expected = found.local, found.slicing.cut(expected)
    else:
        values = found.clone()
    same = values.dtype == expected.dtype and torch.allclose(values, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    return None if same else f"{values} for {expected}"


def _look(value: Any) -> str:
    return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


# Their results are undefined, or random; or they leave an argument that nobody can look at.
UNDEFINED = ("empty", "new_empty", "rand", "bernoulli", "_efficientzerotensor")
# No tensor subclass learns of these, which change what a tensor is.
UNSEEN = ("set_data", "_batch_dim", "sparse")


def _sweep(rank: int) -> tuple[list[str], set[str]]:
    maker = Maker()
    faults: list[str] = []
    answered: set[str] = set()
    for operator in _operators():
        name = str(operator).removeprefix("aten.")
        if any(word in name for word in (*UNDEFINED, *UNSEEN)):
            continue
        arguments = operator._schema.arguments
        has_out = any(a.kwarg_only and a.alias_info is not None for a in arguments)
        tensors = sum("Tensor" in str(a.type) for a in arguments) - has_out
        refused = 0
        for combination, kinds in COMBINATIONS.items():
            # What is refused beside slices and plain tensors of any shape is refused beside numbers too.
            if (tensors == 1 and "," in combination) or refused >= 5:
                continue
            for out in ("slice", "plain") if has_out and combination == "slices" else ("slice",):
                for shape, dtype in CASES:
                    if dtype != torch.float32 and "narrow" in combination:
                        continue

                    def make(place: int, written: bool) -> Argument:
                        return maker(out if written else kinds(place), shape, dtype)  # noqa: B023 (called at once)

                    fault = Call(operator, make).fault()
                    if fault == REFUSED and dtype == torch.float32:
                        # Of other shapes and dtypes it is refused as well.
                        refused += 1
                        break
                    if fault is None:
                        answered.add(f"{name} ({combination})")
                    elif fault not in (REFUSED, AS_TORCH):
                        faults.append(f"{name} ({combination}; {shape}, {dtype}, out: {out}): {fault}")
    return faults, answered


@one_fork
def test_every_operation_in_every_combination_is_right_or_refused() -> Forked:
    """And those that optimizers and their users need are not refused."""
    for faults, answered in (yield On(2, _sweep)):
        assert not faults, f"{len(faults)} wrong answers:\n" + "\n".join(faults[:40])
        for name in (
            "frexp.Tensor",
            "abs_.default",
            "div.Tensor_mode",
            "sum.default",
            "any.default",
            "_foreach_abs_.default",
        ):
            assert f"{name} (slices)" in answered
        for name in (
            "add.out",
            "_foreach_mul.List",
            "_foreach_lerp_.List",
            "mul.Tensor",
            "copy_.default",
            "where.self",
        ):
            assert {f"{name} ({kinds})" for kinds in ("slices", "slice, plain")} <= answered
        assert "where.self (slices)" in answered
        assert "_foreach_mul.List (narrow, slice)" in answered
