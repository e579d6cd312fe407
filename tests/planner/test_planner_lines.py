"""Each line of the planner's schedule (`planner/engine/step.py`) is held by the engine: a change to it is noticed.

The schedule is written by hand, as formulas that need no torch. Here it is changed in one place after the other: a term
is left out, a condition turned, an argument dropped. Oracle: the engine's own meter, simulated at many settings. A
changed schedule has to disagree with it somewhere by more than the formulas may (3 %), or the line says nothing.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from test_planner_simulate import gpt2, tokens, with_adapters

from onecopy.planner.engine import step
from onecopy.planner.engine.simulate import Simulated, describe_units, simulate
from onecopy.planner.model.schedule import Schedule, Unit, Widths
from onecopy.sharding.model import discover
from ranks import run_ranks

pytestmark = pytest.mark.long


class Wide(torch.nn.Module):
    """Blocks whose gradients weigh far more than what they keep for backward; the middle one is the largest."""

    def __init__(self, width: int, widths: Sequence[float] = (1.0, 3.0, 2.0, 0.5)) -> None:
        super().__init__()
        inner = [int(width * factor) for factor in widths]
        self.first = torch.nn.Linear(width, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, w), torch.nn.GELU(), torch.nn.Linear(w, width)) for w in inner
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def rows(width: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.zeros(1, width),)


# Of 16384, blocks are larger than a communication buffer of a GPU (2 GiB).
LARGE, EVEN, FALLING = (partial(Wide, 16384), partial(Wide, 1024, (2.0,) * 4), partial(Wide, 1024, (3.0, 1.0, 0.5)))
LARGE_FALLING, LARGE_RISING = (partial(Wide, 16384, widths) for widths in ((3.0, 1.0, 0.5), (0.5, 1.0, 3.0)))
FP32 = Widths.of("fp32")

# As few as notice what more of them would: found by asking of 190 settings which notice which change.
SETTINGS: list[tuple[Callable[[], Any], Callable[[], Any], Schedule]] = [
    *((gpt2, tokens, Schedule(stage, 8)) for stage in (0, 1)),
    (gpt2, tokens, Schedule(3, 8, micro_batches=2)),
    (gpt2, tokens, Schedule(1, 2, micro_batches=3)),
    (gpt2, tokens, Schedule(2, 2, micro_batches=2)),
    *((with_adapters, tokens, Schedule(stage, 8)) for stage in (0, 3)),
    *((with_adapters, tokens, Schedule(stage, ranks, widths=FP32)) for stage, ranks in ((1, 1), (3, 8))),
    (LARGE, rows(16384), Schedule(0, 8, micro_batches=3)),
    (LARGE, rows(16384), Schedule(1, 2, micro_batches=2)),
    (LARGE, rows(16384), Schedule(3, 8, micro_batches=2)),
    (LARGE_FALLING, rows(16384), Schedule(1, 8, micro_batches=2)),
    *((LARGE_RISING, rows(16384), Schedule(stage, 8, micro_batches=2)) for stage in (1, 2)),
    (FALLING, rows(1024), Schedule(0, 8, micro_batches=3)),
    (EVEN, rows(1024), Schedule(0, 8)),
    *((FALLING, rows(1024), Schedule(1, ranks, widths=FP32)) for ranks in (1, 8)),
    (EVEN, rows(1024), Schedule(2, 8, micro_batches=3)),
    *((EVEN, rows(1024), Schedule(3, 2, micro_batches=g)) for g in (1, 2)),
    # Of its blocks, 8 MB each, two may be ahead.
    (EVEN, rows(1024), Schedule(3, 8, prefetch_bytes=20 * 10**6)),
]

UNNOTICED = {
    "plan.optimizer_tensors": "what is simulated is AdamW",
    "plan.native": "accelerators are simulated: test_planner_simulate.py has gloo on CPU ranks",
    "plan.slices > 1": "through how many rows gloo sends: test_planner_simulate.py has that on CPU ranks",
    "checkpoint": "test_checkpoints_are_simulated has that by hand",
    "unit.working": "the meter does not see what a block recomputes",
    "optimizer_temporaries": "the meter counts none",
    "names[k]": "units inside of units come from units= alone",
    "sliced + becoming → becoming": "the root comes after it, beside as many slices",
    "carries and": "kept gradients go as slices come, so the highest moment is earlier",
}
"""Pieces of the schedule that cannot be noticed here, and why."""

Seen = tuple[list[Unit], Schedule, Simulated]


def _simulate() -> list[Seen]:
    seen: list[Seen] = []
    described: dict[object, list[Unit]] = {}
    for build, batch, schedule in SETTINGS:
        precision = "fp32" if schedule.widths == FP32 else "bf16"
        if (build, precision) not in described:
            described[build, precision] = describe_units(build, batch, precision=precision)
        units = described[build, precision]
        seen.append((units, schedule, simulate(build, batch, schedule, precision=precision)))
    return seen


def _disagreement(module: Any, seen: list[Seen]) -> str:
    """Where a schedule is off by more than 3 % in a phase's sum or in what the step leaves; "" if nowhere."""
    for units, schedule, engine in seen:
        try:
            planned = module.step_bytes(units, schedule)
        except Exception as error:
            return repr(error)
        for phase, sizes in engine.peaks.items():
            if phase not in planned:
                return f"{schedule}: no {phase}"
            formula = dict(planned[phase])
            formula["activations"] += formula.pop("logits")
            rows = [(formula[name], size) for name, size in sizes.items() if name in formula]
            sums = [tuple(sum(row[side] for row in rows) for side in (0, 1))]
            if phase == "step" and formula["optimizer"] != sizes["optimizer"]:
                return f"{schedule}, {phase}: {formula} beside {sizes}"
            for found, expected in sums + (rows if phase == "step" else []):
                if abs(found - expected) > 0.03 * max(abs(expected), 1.0):
                    return f"{schedule}, {phase}: {formula} beside {sizes}"
    return ""


def _alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in place of a piece of the schedule."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield node.left
        if isinstance(node.op, ast.Add):
            yield node.right
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.If):
        for always in (True, False):
            yield ast.If(ast.Constant(always), node.body, node.orelse)
    elif isinstance(node, ast.AugAssign):
        yield ast.Pass()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sizes":
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield ast.Call(node.func, node.args, [k for n, k in enumerate(node.keywords) if n != number])


def _changed_modules() -> Iterator[tuple[str, Any]]:
    """The schedule with one change each, and where the change is."""
    source = inspect.getsource(step)
    tree = ast.parse(source)
    places = [place for place in ast.walk(tree) if hasattr(place, "lineno") or isinstance(place, ast.stmt)]
    for number, place in enumerate(places):
        for alternative in _alternatives(place):
            changed = copy.deepcopy(tree)
            target = [p for p in ast.walk(changed) if hasattr(p, "lineno") or isinstance(p, ast.stmt)][number]
            _Replace(target, alternative).visit(changed)
            module = ModuleType(step.__name__)
            sys.modules[module.__name__] = module
            try:
                exec(compile(ast.fix_missing_locations(changed), "step.py", "exec"), vars(module))
            finally:
                sys.modules[module.__name__] = step
            old, new = (" ".join(ast.unparse(one).split()) for one in (place, alternative))
            yield f"line {place.lineno}: {old} → {new}", module  # type: ignore[attr-defined]


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, alternative: ast.AST) -> None:
        self._target = target
        self._alternative = alternative

    def visit(self, node: ast.AST) -> Any:
        return self._alternative if node is self._target else self.generic_visit(node)


def test_a_change_to_any_line_of_the_schedule_disagrees_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is outside of the tests.
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)
    seen = run_ranks(1, lambda rank: _simulate(), group=False, timeout=240)[0]
    assert _disagreement(step, seen) == ""
    unnoticed = [place for place, module in _changed_modules() if not _disagreement(module, seen)]
    assert [place for place in unnoticed if not any(piece in place for piece in UNNOTICED)] == []
    assert [piece for piece in UNNOTICED if not any(piece in place for place in unnoticed)] == []
