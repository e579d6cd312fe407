"""Engine: the hooks that carry a sharded model through forward and backward. One mechanism for every stage.

    forward   before a unit: gather it (and begin the next), show whole parameters     after: show slices, release*
    backward  before a unit: gather it (and begin the next)                            after: release*, reduce*
    end of backward          reduce what never fired, set p.grad (`reducer.py`), release*

What is starred depends on the stage, and only so: parameters are released if the stage shards them, and after a
step's last backward, since the optimizer is about to change them, if it shards the optimizer; gradients are reduced in
every micro-batch if it shards them, else in the last one of a step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from onecopy.comm.ledger import Ledger
from onecopy.comm.mesh import Mesh
from onecopy.errors import UsageError
from onecopy.memory.meter import Meter
from onecopy.sharding.boundary import at_end_of_backward, in_backward, mark_inputs
from onecopy.sharding.buffers import Buffers
from onecopy.sharding.discover import name_units_for
from onecopy.sharding.entrances import open_entrances
from onecopy.sharding.frames import caller_of_hook, is_running
from onecopy.sharding.ignored import is_ignored
from onecopy.sharding.micro_batches import MicroBatches
from onecopy.sharding.order import AgreedOrder, GatherOrder, agree_order, any_rank
from onecopy.sharding.reducer import Reducer
from onecopy.sharding.sliced import SlicedTensor
from onecopy.sharding.tensors import Edits, find_tensors, replace_tensors
from onecopy.sharding.unit import Passage, Unit, Visit
from onecopy.stage import Stage

ENGINE: Final = "_onecopy_engine"
"""Attribute of a sharded model."""


class Engine:
    """Runs one sharded model.

    Args:
        model: the root module.
        units: all units with parameters, in the order of `model.named_modules()`.
        stage: what is sharded.
        mesh: the ranks.
        ledger: where collectives are booked.
        meter: where bytes are counted.
        inputs: dtype to which floating-point inputs of the model and its units are cast, None to leave them.
        accumulate: micro-batches in a step.
        prefetch: units to gather ahead.
        syncs_buffers: keep buffers equal to the first rank's.

    Attributes:
        gathered: how many `onecopy.gathered` blocks are open; the hooks do nothing inside one.
        micro_batches: where in a step training is.
        buffers: what is not sharded.
        inputs: as it was given.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        stage: Stage,
        mesh: Mesh,
        ledger: Ledger,
        meter: Meter,
        inputs: torch.dtype | None,
        accumulate: int,
        prefetch: int,
        syncs_buffers: bool,
    ) -> None:
        self.model = model
        self.units = list(units)
        self.stage = stage
        self.mesh = mesh
        self.ledger = ledger
        self.meter = meter
        self.gathered = 0
        self.micro_batches = MicroBatches(accumulate)
        self.inputs = inputs
        self.buffers = Buffers(model, mesh, syncs=syncs_buffers)
        self._step_began = 0.0
        self._state_bytes: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._in_model_forward = False
        self._records = False
        self._unrecorded = 0
        self._in_backward = False
        self._visited: set[Unit] = set()
        root = [unit for unit in self.units if unit.scope is model]
        inner = [unit for unit in self.units if unit.scope is not model]
        self._forward = self._gather_order(root + inner, prefetch, backward=False)
        self._backward = self._gather_order(root + inner[::-1], prefetch, backward=True)
        self._reduce_order = inner[::-1] + root
        self.rebuild_gradients()
        for unit in self.units:
            self._attach(unit)
        self._root = root[0] if root else Unit("", model, ())
        if not root:
            self._attach(self._root)
        open_entrances(self._root, self._before_forward, self._after_forward, self._forget_interrupted)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"a sharded {type(self.model).__name__} can be neither copied nor pickled, inside onecopy.gathered either: "
            f"build another model, and give it a copy of model.state_dict() from there."
        )

    def rebuild_gradients(self) -> None:
        """Start from no gradients; to be called when units have new parameters."""
        for unit in self.units:
            unit.rebuild_gradients()
            for gradients in unit.gradients:
                gradients.on_arrival = partial(self._all_arrived, unit)
        self._reducer = Reducer(
            self.units, [u for u in self._reduce_order if u.gradients], self.mesh, self._backward.take_part
        )

    def _attach(self, unit: Unit) -> None:
        before = torch.compiler.disable(partial(self._before_forward, unit))
        after = torch.compiler.disable(partial(self._after_forward, unit))
        unit.scope.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.scope.register_forward_hook(after, always_call=True)

    def _gather_order(self, units: Sequence[Unit], prefetch: int, *, backward: bool) -> GatherOrder:
        return GatherOrder(
            units,
            backward=backward,
            prefetch=prefetch,
            release_passed=self.stage.shards_parameters,
            learn=self._learn_backward if backward else self._learn_forward,
        )

    def _learn_forward(self, seen: list[Unit]) -> AgreedOrder:
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, SlicedTensor) and not is_ignored(parameter):
                raise UsageError(
                    f"parameter {name!r} came into the model after onecopy.shard and would not be averaged over ranks: "
                    f"add and replace modules before."
                )
        order = agree_order(self.mesh, self.units, seen, self.units)
        first = [unit for unit in order.units if unit not in order.optional]
        self._reducer.dynamic = any_rank(self.mesh, seen != first)
        return order

    def _learn_backward(self, seen: list[Unit]) -> AgreedOrder:
        # Where forward came and backward did not, no gradient is needed; where the first rank's data skipped a unit
        # in forward, another rank's may not have.
        skipped = [unit for unit in self.units if unit.gradients and unit not in self._visited]
        return agree_order(self.mesh, self.units, seen, agree_order(self.mesh, self.units, skipped, ()).units)

    # --- forward

    def _before_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.gathered:
            return None
        if unit.scope is self.model:
            self._forget_interrupted()
        recomputes = in_backward()
        visit = unit.record_visit() if torch.is_grad_enabled() else None
        cache = torch.is_autocast_cache_enabled()
        passage = Passage(visit, recomputes, cache, caller_of_hook(), sys.exception())
        unit.passages.append(passage)
        # Autocast would keep cast copies of whole weights, past their release and past the optimizer's step.
        torch.set_autocast_cache_enabled(False)
        if recomputes:
            # For an activation checkpoint. What it gathers stays whole until the unit's own backward has run.
            self._enter_backward()
            if unit.unrecorded:
                unit.unrecorded -= 1
                self._unrecorded -= 1
            if visit is not None:
                unit.enter(visit)
            if not unit.is_whole or self._backward.is_ahead(unit):
                self._backward.visit(unit)
            unit.finish_gather()
        else:
            if self._in_backward:
                self.recover()
            if unit.scope is self.model and len(unit.passages) == 1:
                self._begin_forward(recorded=visit is not None)
            if visit is None and self._records:
                unit.unrecorded += 1
                self._unrecorded += 1
            self.ledger.phase = "forward"
            self._gather_for_forward(unit)
        unit.show_whole()
        args, kwargs = self._cast(args, kwargs, passage.edits)
        if visit is not None:
            visit.time = perf_counter()
            ended = partial(self._after_backward, unit, visit)
            args, kwargs, visit.marked = mark_inputs(ended, args, kwargs, passage.edits)
        return args, kwargs

    def _count_gradients(self) -> None:
        """Slices in `p.grad` come and go by the user's hand, so they are looked at and not followed."""
        self.meter.set("gradients_sliced", sum(g.sliced_bytes for unit in self.units for g in unit.gradients))

    def _begin_forward(self, *, recorded: bool) -> None:
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.check()
        self._in_model_forward = True
        self._records = recorded
        if recorded:
            self.micro_batches.forward_begins()
        self._count_gradients()
        self._forward.begin()
        with self.ledger.during("forward"):
            self.buffers.before_forward(recorded=recorded, last=self.micro_batches.is_last)

    def _cast(self, args: Any, kwargs: Any, edits: Edits) -> tuple[Any, Any]:
        """A unit's floating-point inputs in the compute dtype; another unit may have computed in a wider one."""
        if self.inputs is None:
            return args, kwargs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.inputs) if tensor.is_floating_point() else tensor

        return replace_tensors(args, cast, edits), replace_tensors(kwargs, cast, edits)

    def _gather_for_forward(self, unit: Unit) -> None:
        self._visited.add(unit)
        if self._in_model_forward and unit.buckets:
            self._forward.visit(unit)
        else:
            unit.start_gather()
            unit.finish_gather()
            self.mesh.shard.settle()

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> Any:
        if not unit.passages:
            return None
        passage = unit.passages.pop()
        torch.set_autocast_cache_enabled(passage.autocast_cache)
        if not unit.is_computing:
            unit.show_sliced()
        # A forward that raised comes here too, without an output. So does one that returns None.
        failed = output is None and sys.exception() is not passage.handled
        if not passage.recomputes:
            if passage.visit is not None and not failed:
                self._record(unit, passage.visit, "forward")
                self._watch(unit, passage.visit, output)
            if self.stage.shards_parameters and not unit.in_use:
                output = self._keep_returned_parameters(unit, output)
                unit.release()
        passage.edits.undo()
        if unit.scope is self.model and not unit.passages and not passage.recomputes:
            self._in_model_forward = self._records = False
            if not failed:
                self._forward.end()
                self.mesh.shard.settle()
        return output

    def _watch(self, unit: Unit, visit: Visit, output: Any) -> None:
        """Have `_before_backward` called when the first gradient comes back to what the unit returned."""
        found = find_tensors(output)
        for tensor in found:
            if (node := tensor.grad_fn) is not None:
                node.register_prehook(partial(self._before_backward, unit, visit))
        unit.holds = unit.holds or not found

    def _keep_returned_parameters(self, unit: Unit, output: Any) -> Any:
        """Copies in place of whole parameters that forward returned, whose memory is about to go."""
        return replace_tensors(output, lambda tensor: tensor.clone() if unit.shares_memory(tensor) else tensor)

    # --- backward

    def _enter_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self.ledger.phase = "backward"
        self._backward.begin()
        last = self.micro_batches.is_last
        self._reducer.begin(sends=self.stage.shards_gradients or last, last=last)
        at_end_of_backward(self._end_of_backward)

    @property
    def _releases_after_backward(self) -> bool:
        """Whether whole parameters have no further use once this backward is through with them."""
        return self.stage.shards_parameters or (self.stage.shards_optimizer and self.micro_batches.step_follows)

    def _before_backward(self, unit: Unit, visit: Visit, _: object) -> None:
        if visit.began:
            return
        if torch.is_grad_enabled():
            raise UsageError(
                "backward with create_graph=True (double backward, a gradient penalty) is not supported: what it "
                "records would use whole parameters that are let go."
            )
        unit.check_visit(visit)
        unit.enter(visit)
        self._enter_backward()
        if unit.buckets:
            self._backward.visit(unit)
            # For activation checkpoints inside of the unit, which recompute without calling it.
            unit.show_whole()
        visit.time = perf_counter()

    def _after_backward(self, unit: Unit, visit: Visit) -> None:
        """The gradients of the unit's inputs are there, and so all of its backward has run."""
        self._end_visit(unit, visit)
        if (unit.all_arrived and not unit.unrecorded) or not unit.awaits_backward:
            self._reducer.finished(unit, self._visited)

    def _all_arrived(self, unit: Unit) -> None:
        """The last gradient of one of the unit's buckets is there. Without inputs to watch, that is the end."""
        if (
            self._unrecorded == 0
            and unit.all_arrived
            and not any(visit.marked and not visit.ended for visit in unit.entered)
        ):
            for visit in unit.entered:
                if not visit.ended:
                    self._end_visit(unit, visit)
            self._reducer.finished(unit, self._visited)

    def _record(self, unit: Unit, visit: Visit, phase: str) -> None:
        if (timeline := self.ledger.timeline) is not None:
            timeline.add(f"{phase} {unit.name or '(root)'}", "compute", phase, unit.name, visit.time, perf_counter())

    def _end_visit(self, unit: Unit, visit: Visit) -> None:
        unit.exit(visit)
        self._record(unit, visit, "backward")
        if not unit.is_computing:
            unit.show_sliced()
        if self._releases_after_backward and not unit.in_use:
            unit.release(frozen=self.stage.shards_parameters)

    def _end_of_backward(self) -> None:
        # Others may need these gathers before they can send the gradients that are waited for here.
        self._backward.start_rest()
        self._reducer.end(deviated=self._forward.deviated or self._backward.deviated)
        self._backward.end()
        self.mesh.shard.settle()
        self._leave_backward()
        self.micro_batches.backward_ended()

    def _leave_backward(self) -> None:
        for unit in self.units:
            unit.leave()
            unit.show_sliced()
            if self._releases_after_backward:
                unit.release(frozen=self.stage.shards_parameters)
        self._visited.clear()
        self._unrecorded = 0
        self._in_backward = False
        self.ledger.phase = "step"

    # --- what the user calls

    def reduce_gradients(self) -> None:
        """Send what micro-batches have kept, as if the last of them had been the last one of the step."""
        if self._in_backward:
            self.recover()
        with self.ledger.during("backward"):
            self._reducer.begin(sends=True, last=True)
            self._reducer.end(deviated=False)
            for unit in self.units:
                unit.finished = False
        self.micro_batches.begin_anew()

    def advise(self, parameter: str) -> str:
        """What lets ``parameter`` be used where it was just now: in the model's forward, but outside of its unit's."""
        if not self._in_model_forward:
            return ""
        units = name_units_for(self.model, [unit.name for unit in self.units], parameter)
        return (
            f" To use it in other modules' forwards too, make it the root's, which is whole for all of the model's "
            f"forward: onecopy.shard(..., units={units})."
        )

    def enter_gathered(self) -> None:
        """A `onecopy.gathered` block begins; whoever calls this counts ``gathered`` down at its end."""
        self.come_to_rest()
        if self._in_backward or any(unit.passages for unit in self.units):
            raise UsageError("onecopy.gathered cannot be entered while the model is computing.")
        self.buffers.settle()
        self.gathered += 1

    def before_step(self) -> None:
        """The optimizer is about to step."""
        self.come_to_rest()
        self._reducer.settle()
        self.ledger.phase = "step"
        self.buffers.before_step()
        self._count_gradients()
        self._step_began = perf_counter()

    def step_done(self, optimizer: object, state_bytes: int) -> None:
        """``optimizer``, which holds ``state_bytes`` of states, has stepped: a micro-batch is a step's first again."""
        self.micro_batches.stepped()
        self._state_bytes[optimizer] = state_bytes
        self.meter.set("optimizer", sum(self._state_bytes.values()))
        if (timeline := self.ledger.timeline) is not None:
            timeline.add("optimizer step", "compute", "step", "", self._step_began, perf_counter())
        self.ledger.close_step()

    def come_to_rest(self) -> None:
        """Show slices everywhere if nothing computes, after a forward or backward that ended with an exception too."""
        self._forget_interrupted()
        if self._in_backward and not in_backward():
            self.recover()

    def _forget_interrupted(self) -> None:
        # The outermost last: it has seen what autocast was set to.
        for unit in [*self.units[::-1], self._root]:
            for passage in [p for p in unit.passages[::-1] if not is_running(p.caller)]:
                unit.passages.remove(passage)
                passage.edits.undo()
                torch.set_autocast_cache_enabled(passage.autocast_cache)
                unit.show_sliced()
                if self.stage.shards_parameters and not unit.in_use:
                    unit.release()
        if not self._root.passages:
            self._in_model_forward = self._records = False

    def recover(self) -> None:
        """Go on after a backward that raised an error, on every rank alike: with the first micro-batch of a step."""
        self._reducer.drop()
        self.micro_batches.begin_anew()
        self._leave_backward()


def find_engine(model: nn.Module) -> Engine | None:
    """The engine of ``model``, None if it is not what `onecopy.shard` has returned."""
    engine = getattr(model, ENGINE, None)
    return engine if isinstance(engine, Engine) else None
