"""Step: what the engine holds at each moment of a step, unit by unit, as its schedule does it.

The paper's formulas (`memory.py`) say what is held between steps; this file adds what comes and goes: the gathered
window and what is prefetched, gradients on their way, the temporaries of the update. It follows `sharding/` closely:

    forward    the root and the unit that computes are whole, ``prefetch`` more; stages 0 to 2 keep what was gathered
    backward   the same, backwards; one unit's gradients arrive while those of units before are being sent; stages 1
               and 2 let whole parameters go as it passes, in a step's last micro-batch
    step       slices alone (stage 3), the optimizer's states, its temporaries

Bytes are those of tensors, by the meter's categories and three more (`CATEGORIES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from onecopy.planner.formulas.buffers import optimizer_temporary_bytes, staging_bytes
from onecopy.planner.model.schedule import CATEGORIES, Phase, Schedule, Sizes, Unit, layout, own_numel, padded_numels
from onecopy.stage import Stage


def step_bytes(units: Sequence[Unit], plan: Schedule) -> dict[Phase, Sizes]:
    """For forward, backward and step the categories in bytes on the first rank at the highest moment.

    Args:
        units: in the order of forward, the root first; units without parameters count too.

    Raises:
        SettingsError: if there is no such stage.
    """
    highest: dict[Phase, Sizes] = {}
    for phase, sizes in _moments([unit for unit in units if unit.all_parameters], plan):
        if phase not in highest or sum(sizes.values()) > sum(highest[phase].values()):
            highest[phase] = sizes
    return highest


def held_between_steps(units: Sequence[Unit], plan: Schedule) -> Sizes:
    """Bytes by category when the optimizer has just stepped and gradients are still there."""
    moments = [sizes for phase, sizes in _moments([u for u in units if u.all_parameters], plan) if phase == "step"]
    return {**moments[-1], "optimizer_temporaries": 0.0}


class _Held:
    """Closed sums over units, and the moving parts."""

    def __init__(self, units: Sequence[Unit], plan: Schedule) -> None:
        self.units = units
        self.plan = plan
        self.kind = Stage.of(plan.stage)
        self.layouts = [layout(unit, plan) for unit in units]
        self.padded = [padded_numels(unit, plan)[0] for unit in units]
        self.frozen = [padded_numels(unit, plan)[1] for unit in units]
        self.slices = [numel // plan.slices for numel in self.padded]
        self.own = [own_numel(one.numels, one.num_slices, one.multiple) for one in self.layouts]
        self.aliased = plan.slices == 1 and plan.widths.compute == plan.widths.master
        self.alone = plan.slices * plan.copies == 1
        self.staged = [0.0 if self.alone else self._staging(numel) for numel in self.padded]
        self.total = sum(self.padded)
        # A bucket that is neither cut nor cast is its own whole.
        self.frozen_whole = [
            0 if plan.slices == 1 and plan.widths.compute == unit.frozen_width else numel
            for unit, numel in zip(units, self.frozen, strict=True)
        ]
        self.total_own = sum(self.own)
        self._base = self._constant()

    def _constant(self) -> Sizes:
        widths, plan = self.plan.widths, self.plan
        base: Sizes = dict.fromkeys(CATEGORIES, 0.0)
        frozen = sum(u.frozen_width * numel for u, numel in zip(self.units, self.frozen, strict=True)) / plan.slices
        base["parameters_sliced"] = widths.master * sum(self.slices) + frozen
        if plan.optimizer_tensors:
            counters = 4.0 * sum(len(unit.numels) for unit in self.units)
            base["optimizer"] = plan.optimizer_tensors * widths.master * self.total_own + counters
        if not plan.native:
            base["communication"] = min(plan.staging_limit, max(self.staged, default=0.0))
        return base

    def lent(self, underway: Sequence[int]) -> Sizes:
        """Bytes of the buffers that the units under way hold, where they are not kept all the time."""
        if not self.plan.native:
            return {}
        limit = self.plan.staging_limit
        return {"communication": sum(min(self.staged[i], limit) / 2 for i in underway)}

    def complete(self, underway: Sequence[int], i: int) -> int:
        """How many of the units under way are waited for as unit ``i`` is sent: before that, on gloo after it."""
        if not self.plan.native:
            return len(underway)
        room = 2 * max(self.padded)
        counts = range(len(underway))
        return next((n for n in counts if sum(self.padded[k] for k in (*underway[n:], i)) <= room), len(underway))

    def ahead(self, order: Sequence[int], start: int) -> Sequence[int]:
        """What is gathered ahead of ``start`` in an order: ``prefetch`` units, and more while they hold few bytes."""
        count = total = 0
        for i in order[start:]:
            total += self.plan.widths.compute * (self.padded[i] + self.frozen[i])
            if count >= self.plan.prefetch and total > self.plan.prefetch_bytes:
                break
            count += 1
        return order[start : start + count]

    def _staging(self, padded: int) -> float:
        """Bytes of the buffers through which a bucket of so many elements would go at once; they may be smaller."""
        plan = self.plan
        over = plan.slices if plan.slices > 1 else plan.copies
        casts = plan.widths.reduce != plan.widths.accumulate
        return staging_bytes(
            padded, over, plan.widths.reduce, native=plan.native, all_reduces=plan.slices == 1, casts=casts
        )

    def lingers(self, i: int) -> bool:
        """Whether unit ``i`` is larger than a buffer, so that its gradients wait for their turn."""
        return self.staged[i] > self.plan.staging_limit

    def installed(self, posted: float, *, carries: bool) -> float:
        """Bytes that a reduced slice adds to `p.grad`: none where there is one already."""
        return 0.0 if carries and self.kind.shards_gradients else posted

    def sizes(self, **moving: float) -> Sizes:
        """All categories; those not given stay as they are all the time."""
        return self._base | moving

    def gathered(self, present: Sequence[int], done: Sequence[int] = ()) -> float:
        """Bytes of whole parameters while the units ``present`` are needed.

        Args:
            present: units, in any order.
            done: those whose last backward before the step is over; below stage 3 all others are still there, and
                what is frozen too.
        """
        needed = set(present)
        if self.kind.shards_parameters:
            frozen = sum(self.frozen_whole[i] for i in needed)
        else:
            needed = set(range(len(self.units))) - (set(done) if self.kind.shards_optimizer else set())
            frozen = sum(self.frozen_whole)
        trained = sum(self.padded[i] for i in needed)
        return float(self.plan.widths.compute * ((0 if self.aliased else trained) + frozen))


def _moments(units: Sequence[Unit], plan: Schedule) -> Iterator[tuple[Phase, Sizes]]:
    held = _Held(units, plan)
    yield from _forward(held)
    yield from _backward(held, carries=plan.micro_batches > 1, last=True)
    if plan.micro_batches > 1:
        yield from _backward(held, carries=plan.micro_batches > 2, last=False)
    widths = plan.widths
    temporaries = optimizer_temporary_bytes(
        held.total_own, plan.implementation, master_bytes=widths.master, gradient_bytes=widths.gradient
    )
    yield (
        "step",
        held.sizes(
            parameters_gathered=held.gathered((), range(len(units))),
            gradients_sliced=float(widths.gradient * held.total_own),
            optimizer_temporaries=temporaries,
        ),
    )


@dataclass(frozen=True)
class _Nesting:
    """Units inside of units, by their names; the root is around all.

    Attributes:
        around: for each unit those whose forward contains its own, and itself.
        backward: the order in which backward comes to units: a unit before those inside of it.
        finished: the order in which backward leaves them: a unit after those inside of it.
    """

    around: list[list[int]]
    backward: list[int]
    finished: list[int]

    @staticmethod
    @lru_cache(maxsize=16)
    def of(names: tuple[str, ...]) -> _Nesting:
        """That of units of these names."""
        around: list[list[int]] = []
        inside: dict[int, list[int]] = {}
        for i, name in enumerate(names):
            outer = [k for k in range(i) if names[k] == "" or name.startswith(names[k] + ".")]
            around.append([*outer, i])
            inside.setdefault(outer[-1] if outer else -1, []).append(i)
        backward: list[int] = []
        finished: list[int] = []

        def visit(i: int) -> None:
            backward.append(i)
            for child in reversed(inside.get(i, [])):
                visit(child)
            finished.append(i)

        for i in reversed(inside.get(-1, [])):
            visit(i)
        return _Nesting(around, backward, finished)


def _carried(held: _Held) -> tuple[float, float]:
    """Gradients of earlier micro-batches in a forward or backward: whole, and as slices."""
    plan = held.plan
    if plan.micro_batches == 1:
        return 0.0, 0.0
    if held.kind.shards_gradients:
        return 0.0, float(plan.widths.gradient * held.total_own)
    return float(plan.widths.accumulate * held.total), 0.0


def _forward(held: _Held) -> Iterator[tuple[Phase, Sizes]]:
    units = held.units
    nesting = _Nesting.of(tuple(unit.name for unit in units))
    whole, sliced = _carried(held)
    common = {"gradients_whole": whole, "gradients_sliced": sliced}
    kept = checkpoints = 0.0
    for i, unit in enumerate(units):
        kept += unit.activations
        checkpoints += unit.checkpoint
        gathered = held.gathered([*nesting.around[i], i, *held.ahead(range(len(units)), i + 1)])
        common["checkpoints"] = checkpoints
        yield (
            "forward",
            held.sizes(parameters_gathered=gathered, activations=kept + unit.working, **common),
        )
    gathered = held.gathered([i for i, unit in enumerate(units) if unit.name == ""])
    logits = sum(unit.logits for unit in units)
    yield "forward", held.sizes(parameters_gathered=gathered, activations=kept, logits=logits, **common)


def _backward(held: _Held, *, carries: bool, last: bool) -> Iterator[tuple[Phase, Sizes]]:
    """Unit by unit: its gradients arrive; then they leave through the buffers, while the one before is finished.

    Args:
        carries: there are gradients of earlier micro-batches.
        last: the optimizer steps after it.
    """
    units, widths = held.units, held.plan.widths
    nesting = _Nesting.of(tuple(unit.name for unit in units))
    sends = last or held.kind.shards_gradients
    whole, sliced = _carried(held) if carries else (0.0, 0.0)
    kept = sum(unit.activations for unit in units)
    checkpoints = sum(unit.checkpoint for unit in units)
    order = nesting.backward
    yield (
        "backward",
        held.sizes(
            parameters_gathered=held.gathered([order[0], *held.ahead(order, 1)]),
            gradients_whole=whole,
            gradients_sliced=sliced,
            activations=kept,
            checkpoints=checkpoints,
            logits=sum(unit.logits for unit in units),
        ),
    )
    place = {i: position for position, i in enumerate(order)}
    reached = 0
    # What units under way hold: gradients that have not been copied out, and the slices that they become.
    underway: list[int] = []
    leaves: dict[int, float] = {}
    becomes: dict[int, float] = {}
    done: list[int] = []
    for i in nesting.finished:
        unit = units[i]
        reached = max(reached, place[i])
        coming = held.ahead(order, reached + 1)
        leaving, becoming = (sum(part[k] for k in underway) for part in (leaves, becomes))
        arrived = float(widths.compute * unit.parameters)
        # What the unit kept goes while its gradients come: the highest moment is either end.
        for gradients, activations, left in (
            (0.0, kept + unit.working, checkpoints),
            (arrived, kept - unit.activations, checkpoints - unit.checkpoint),
        ):
            yield (
                "backward",
                held.sizes(
                    parameters_gathered=held.gathered([*nesting.around[i], *coming], done),
                    gradients_whole=whole + gradients + leaving,
                    gradients_sliced=sliced + becoming,
                    activations=activations,
                    checkpoints=left,
                    **held.lent(underway),
                ),
            )
        kept -= unit.activations
        checkpoints -= unit.checkpoint
        if last:
            done.append(i)
        becomes[i] = float(widths.accumulate * held.slices[i]) if sends else 0.0
        complete = held.complete(underway, i)
        still = underway[complete:] if held.plan.native else underway
        leaving, becoming = (sum(part[k] for k in still) for part in (leaves, becomes))
        gone = sum(held.installed(becomes[k], carries=carries) for k in underway[:complete])
        if not sends and not carries:
            whole += widths.accumulate * held.padded[i]
        # What is added to kept gradients is gone before those are sent.
        added = 0.0 if sends and whole else arrived
        yield (
            "backward",
            held.sizes(
                parameters_gathered=held.gathered([*nesting.around[i][:-1], *coming], done),
                gradients_whole=whole + added + leaving,
                gradients_sliced=sliced + becoming + becomes[i] + (gone if held.plan.native else 0.0),
                activations=kept,
                checkpoints=checkpoints,
                **held.lent([*still, i] if sends else []),
            ),
        )
        if not sends:
            continue
        sliced += gone
        underway = [*underway[complete:], i]
        leaves[i] = arrived if held.lingers(i) else 0.0
        if whole:
            # What micro-batches have kept goes out, with this one's added.
            whole -= widths.accumulate * held.padded[i]
            leaves[i] = float(widths.accumulate * held.padded[i]) if held.lingers(i) else 0.0
