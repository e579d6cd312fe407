"""Engine: the hooks that carry a sharded model through forward and backward. One mechanism for every stage.

    forward   before a unit: gather it (and begin the next), show whole parameters     after: show slices, release*
    backward  before a unit: gather it (and begin the next)                            after: release*, reduce*
    end of backward          reduce what never fired, set p.grad (`reducer.py`), release*
    a write                  once no rank reads slices any more (`versions.py`)

What is starred depends on the stage, and only so: parameters are released if the stage shards them, and after a
step's last backward, since the optimizer is about to change them, if it shards the optimizer; gradients are reduced in
every micro-batch if it shards them, else in the last one of a step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from onecopy.comm.mesh import Mesh
from onecopy.errors import UsageError
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import IN_HOST_MEMORY, Meter
from onecopy.sharding.bucket.bucket import Bucket
from onecopy.sharding.bucket.layout import Layout
from onecopy.sharding.bucket.masters import Stores
from onecopy.sharding.bucket.saved import SavedWeights
from onecopy.sharding.engine.buffers import Buffers
from onecopy.sharding.engine.entrances import open_entrances, parts_of, wrapped_by
from onecopy.sharding.engine.micro_batches import MicroBatches
from onecopy.sharding.engine.order import PREFETCH_BYTES, Foresight
from onecopy.sharding.engine.reducer import Reducer
from onecopy.sharding.engine.unit import RecordedForward, RunningForward, Unit
from onecopy.sharding.engine.versions import Versions
from onecopy.sharding.graph.boundary import at_end_of_backward, in_backward, in_transform, mark_inputs
from onecopy.sharding.graph.compiled import untraced
from onecopy.sharding.graph.frames import caller_of_hook, is_running
from onecopy.sharding.graph.tensors import Edits, find_tensors, replace_tensors
from onecopy.sharding.model.discover import name_units_for
from onecopy.sharding.model.ignored import is_ignored
from onecopy.sharding.tensor.sliced import SlicedTensor
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
        prefetch_bytes: further ones while all of them hold no more; None: `PREFETCH_BYTES` on an accelerator.
        syncs_buffers: keep buffers equal to the first rank's.
        stores: where slices rest; None: on the device.
        mirror: whether, or where, another rank holds this one's slices too (`resilience/`).
        mesh_shape: the type of device, sizes and names of axes of the DeviceMesh that ``mesh`` was made of, if it was.

    Attributes:
        gathered: how many `onecopy.gathered` blocks are open; the hooks do nothing inside one.
        micro_batches: where in a step training is.
        versions: when slices may be read by others, and when they may change.
        buffers: what is not sharded.
        lays_whole: some parameters lie whole in one rank's slice.
        inputs, stores, mirror, mesh_shape: as they were given.
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
        prefetch_bytes: int | None,
        syncs_buffers: bool,
        stores: Stores | None = None,
        mirror: bool | str = False,
        mesh_shape: tuple[str, tuple[int, ...], tuple[str, ...]] | None = None,
    ) -> None:
        self.model = model
        self.units = list(units)
        self.stage = stage
        self.mesh = mesh
        self.ledger = ledger
        self.meter = meter
        self.stores = stores
        self.mirror = mirror
        self.mesh_shape = mesh_shape
        self.gathered = 0
        self.lays_whole = any(e.sliced.slicing.is_whole for u in self.units for b in u.buckets for e in b.entries)
        self.micro_batches = MicroBatches(accumulate)
        self.inputs = inputs
        self.buffers = Buffers(model, mesh, syncs=syncs_buffers)
        self._step_began = 0.0
        self._state_bytes: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._in_model_forward = False
        self._records = False
        self._trains = False
        self._counts = False
        self._has_looked = False
        self._awaits_backward = False
        self._unrecorded = 0
        self._in_backward = False
        self._used: set[Unit] = set()
        self._prefetch = prefetch, prefetch_bytes
        self._step_is_open = False
        root = [unit for unit in self.units if unit.scope is model]
        if not root:
            root = [Unit("", model, ())]
            self.units.insert(0, root[0])
        self._root = root[0]
        self._reduce_order = [unit for unit in self.units if unit is not self._root][::-1] + root
        self.versions = self._make_versions()
        self.rebuild_gradients()
        for unit in self.units:
            self._attach(unit)
        self._open_entrances(wrapped_by(model))

    def _make_versions(self) -> Versions:
        versions = Versions(self.mesh.shard, self.buckets, 2 if self.stage.shards_parameters else 1)
        versions.lay_out()
        return versions

    @property
    def buckets(self) -> list[Bucket]:
        """Of all units, in their order."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"a sharded {type(self.model).__name__} can be neither copied nor pickled, inside onecopy.gathered "
            "either: build a second model, and load a copy of model.state_dict() that you made inside "
            "onecopy.gathered."
        )

    def rebuild_gradients(self) -> None:
        """Start from no gradients; to be called when units have new parameters, which may be on another device."""
        self._foresee()
        self._take_parameters()
        self._make_reducer()

    def _take_parameters(self) -> None:
        for unit in self.units:
            unit.rebuild_gradients()
            for gradients in unit.gradients:
                gradients.on_arrival = partial(self._all_arrived, unit)
        released = [bucket for bucket in self.buckets if self.stage.shards_parameters and bucket.is_own_memory]
        self._saved = SavedWeights(released, self._gather_saved)
        for bucket in self.buckets:
            bucket.seal()

    def _make_reducer(self) -> None:
        alike = self.stage.shards_optimizer and not self.versions.reads_freely and self.mesh.shard.size > 1
        self._reducer = Reducer(
            self.units,
            [u for u in self._reduce_order if u.gradients],
            self.mesh,
            (lambda: self._forward.seen + self._backward.seen) if alike else None,
        )
        if alike:
            for unit in self.units:
                unit.remember_forwards()

    def _foresee(self) -> None:
        """Start from no knowledge of the order of units."""
        depth, nbytes = self._prefetch
        on_device = any(bucket.device.type not in ("cpu", "meta") for bucket in self.buckets)
        # What stays whole is gathered as early as can be: it costs no memory that the end of forward does not.
        early = on_device and depth and not self.stage.shards_parameters
        if nbytes is None:
            nbytes = PREFETCH_BYTES if on_device else 0
        self._forward = Foresight(len(self.units) if early else depth, nbytes)
        self._backward = Foresight(depth, nbytes)
        self._keeps_opening = on_device and self.stage.shards_parameters

    def _attach(self, unit: Unit) -> None:
        before = untraced(partial(self._before_forward, unit))
        after = untraced(partial(self._after_forward, unit))
        unit.scope.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.scope.register_forward_hook(after, always_call=True)

    def open_parts(self) -> None:
        """From now on a call of one of the model's parts, outside of the model's forward, is a forward of the model."""
        self._open_entrances(parts_of(self.model))

    def _open_entrances(self, modules: Iterable[nn.Module]) -> None:
        open_entrances(modules, self._root, self._before_forward, self._after_forward, self._forget_interrupted)

    def _gather_saved(self, bucket: Bucket) -> None:
        """Backward comes to a weight by a way that no hook has announced."""
        bucket.start_gather(backward=True)
        bucket.finish_gather()

    def _gather(self, unit: Unit, foresight: Foresight) -> None:
        """Make ``unit`` whole, and begin to gather what is likely to come next."""
        backward = foresight is self._backward
        ahead = foresight.next_after(unit)
        unit.start_gather(backward=backward)
        # Before waiting: a link between two gathers must not stand idle.
        for following in ahead:
            following.start_gather(backward=backward)
        unit.finish_gather()

    # --- forward

    def _before_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.gathered:
            return None
        if in_transform():
            raise UsageError(
                "the transforms of torch.func (vmap, jvp, jacrev, …) do not work on a sharded model, because it "
                "gathers and releases its parameters: call them inside `with onecopy.gathered(model):`, where "
                "parameters are whole."
            )
        if unit.scope is self.model:
            self._forget_interrupted()
        recomputes = in_backward()
        forward = unit.record_forward() if torch.is_grad_enabled() else None
        cache = torch.is_autocast_cache_enabled()
        running = RunningForward(forward, recomputes, cache, caller_of_hook(), sys.exception())
        unit.running.append(running)
        # Autocast would keep cast copies of whole weights, past their release and past the optimizer's step.
        torch.set_autocast_cache_enabled(False)
        if recomputes:
            # For an activation checkpoint. What it gathers stays whole until the unit's own backward has run.
            if not self._in_backward:
                self._enter_backward_unannounced()
            if unit.unrecorded:
                unit.unrecorded -= 1
                self._unrecorded -= 1
            if forward is not None:
                unit.enter(forward)
            self._gather(unit, self._backward)
        else:
            if self._in_backward:
                self.recover()
            # Before any message: others may wait for it while this rank waits for theirs.
            self.versions.lay_out()
            if unit.scope is self.model and len(unit.running) == 1:
                self._begin_forward(recorded=forward is not None)
            if forward is None and self._records:
                unit.unrecorded += 1
                self._unrecorded += 1
            self.ledger.phase = "forward"
            self._used.add(unit)
            self._gather(unit, self._forward)
        unit.show_whole()
        args, kwargs = self._cast(args, kwargs, running.edits)
        if forward is not None:
            forward.time = perf_counter()
            ended = partial(self._after_backward, unit, forward)
            args, kwargs, forward.marked = mark_inputs(ended, args, kwargs, running.edits)
            if self._saved:
                running.hooks = self._saved.enter()
        return args, kwargs

    def _count_gradients(self) -> None:
        """Slices in `p.grad` come and go by the user's hand, so they are looked at and not followed."""
        self.meter.set("gradients_sliced", sum(g.sliced_bytes for unit in self.units for g in unit.gradients))

    def _begin_forward(self, *, recorded: bool) -> None:
        for bucket in self.buckets:
            bucket.check(trains=recorded)
        self._in_model_forward = True
        self._records = recorded
        if recorded:
            # A reference model's forward between this one and its backward may freeze what trains (PEFT's adapters).
            self._trains = self._any_trains()
            self.micro_batches.forward_begins()
            self._awaits_backward = True
        self._count_gradients()
        self._forward.begin()
        with self.ledger.during("forward"):
            self.buffers.before_forward(recorded=recorded)

    def _cast(self, args: Any, kwargs: Any, edits: Edits) -> tuple[Any, Any]:
        """A unit's floating-point inputs in the compute dtype; another unit may have computed in a wider one."""
        if self.inputs is None:
            return args, kwargs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.inputs) if tensor.is_floating_point() else tensor

        return replace_tensors(args, cast, edits), replace_tensors(kwargs, cast, edits)

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if not unit.running:
            return
        running = unit.running.pop()
        self._undo(running)
        try:
            if not unit.is_computing:
                unit.show_sliced()
        finally:
            # A forward that raised comes here too, without an output. So does one that returns None.
            failed = output is None and sys.exception() is not running.handled
            if not running.recomputes:
                if running.forward is not None and not failed:
                    self._record(unit, running.forward, "forward")
                    self._watch(unit, running.forward, output)
                if self.stage.shards_parameters and not unit.is_computing and (failed or not self._stays(unit)):
                    unit.release()
            if unit.scope is self.model and not unit.running and not running.recomputes:
                self._end_forward(failed)

    def _undo(self, running: RunningForward) -> None:
        """Put back what a forward had changed around it."""
        if running.hooks is not None:
            running.hooks.leave()
        torch.set_autocast_cache_enabled(running.autocast_cache)
        running.edits.undo()

    def _stays(self, unit: Unit) -> bool:
        """Whether a unit stays whole after its forward, since backward begins with it."""
        return self._keeps_opening and self._records and unit in self._backward.opening()

    def _end_forward(self, failed: bool) -> None:
        if self.stage.shards_parameters:
            for unit in self.units:
                if not unit.is_computing and (failed or not self._stays(unit)):
                    # What was gathered ahead and not come to.
                    unit.release()
        self._in_model_forward = self._records = False
        if not failed and not self._has_looked:
            self._has_looked = True
            self._refuse_new_parameters()

    def _refuse_new_parameters(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, SlicedTensor) and not is_ignored(parameter):
                raise UsageError(
                    f"parameter {name!r} was added to the model after onecopy.shard, so its gradient would not be "
                    "averaged over ranks: add and replace modules before onecopy.shard."
                )

    def _watch(self, unit: Unit, forward: RecordedForward, output: Any) -> None:
        """Have `_before_backward` called when the first gradient comes back to what the unit returned."""
        for tensor in find_tensors(output):
            if (node := tensor.grad_fn) is not None:
                node.register_prehook(partial(self._before_backward, unit, forward))

    # --- backward

    def _enter_backward_unannounced(self) -> None:
        """A backward that is not of a recorded forward runs the model: a checkpoint around all of it, or GradCache.

        Then forwards and backwards of it follow one another until that backward ends.
        """
        self._trains = torch.is_grad_enabled() and self._any_trains()
        self._enter_backward(holds=True)

    def _any_trains(self) -> bool:
        return any(entry.shown.requires_grad for bucket in self.buckets for entry in bucket.entries)

    def _enter_backward(self, *, differentiated: bool = False, holds: bool = False) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._awaits_backward = False
        self._counts = self._trains and not differentiated
        self.ledger.phase = "backward"
        self._backward.begin()
        last = self.micro_batches.is_last
        self._reducer.begin(sends=self._counts and (self.stage.shards_gradients or last), last=last, holds=holds)
        at_end_of_backward(self._end_of_backward)

    @property
    def _releases_after_backward(self) -> bool:
        """Whether whole parameters have no further use once this backward is through with them."""
        return self.stage.shards_parameters or (
            self.stage.shards_optimizer and self._counts and self.micro_batches.step_follows
        )

    def _before_backward(self, unit: Unit, forward: RecordedForward, _: object) -> None:
        if forward.began:
            return
        if torch.is_grad_enabled() and self.stage.shards_parameters:
            raise UsageError(
                "backward with create_graph=True (double backward, a gradient penalty) is not supported at stage 3: "
                "shard at stage 1 or 2, or compute the gradient and its penalty inside one unit's forward (with "
                "units=[] that is the model's own forward)."
            )
        unit.check_unchanged(forward)
        unit.enter(forward)
        self._enter_backward(differentiated=torch.is_grad_enabled())
        if unit.buckets:
            self._gather(unit, self._backward)
            # For activation checkpoints inside of the unit, which recompute without calling it.
            unit.show_whole()
        forward.time = perf_counter()

    def _after_backward(self, unit: Unit, forward: RecordedForward) -> None:
        """The gradients of what the unit was given are there, and so all of its backward has run."""
        self._end_backward_of(unit, forward)
        self._reduce_if_over(unit)

    def _all_arrived(self, unit: Unit) -> None:
        """The last gradient of one of the unit's buckets is there. Without inputs to watch, that is the end."""
        if self._has_all(unit):
            for forward in unit.entered:
                if not forward.ended:
                    self._end_backward_of(unit, forward)
        self._reduce_if_over(unit)

    def _has_all(self, unit: Unit) -> bool:
        """Whether every gradient is there that may come in this backward."""
        return (
            self._unrecorded == 0
            and unit.all_arrived
            and all(forward.ended or not forward.marked for forward in unit.entered)
        )

    def _reduce_if_over(self, unit: Unit) -> None:
        """The unit's backward is over when that of all its forwards is, or when no further gradient can come."""
        if self._has_all(unit) or not unit.awaits_backward:
            self._reducer.finished(unit, self._used)

    def _record(self, unit: Unit, forward: RecordedForward, phase: str) -> None:
        if (timeline := self.ledger.timeline) is not None:
            timeline.add(f"{phase} {unit.name or '(root)'}", "compute", phase, unit.name, forward.time, perf_counter())

    def _end_backward_of(self, unit: Unit, forward: RecordedForward) -> None:
        unit.exit(forward)
        self._record(unit, forward, "backward")
        if not unit.is_computing:
            unit.show_sliced()
        if self._releases_after_backward and not unit.is_computing:
            unit.release(frozen=self.stage.shards_parameters)

    def _end_of_backward(self) -> None:
        try:
            self._reducer.end()
        except BaseException:
            self._begin_step_anew()
            raise
        finally:
            self._leave_backward()
        if self._counts:
            self.buffers.micro_batch_ended(last=self.micro_batches.is_last)
            self.micro_batches.backward_ended()

    def _begin_step_anew(self) -> None:
        """A backward failed, here or on another rank: the next micro-batch is a step's first, on all of them."""
        self.micro_batches.begin_anew()
        self.buffers.micro_batch_ended(last=True)

    def _leave_backward(self) -> None:
        for unit in self.units:
            unit.leave()
            unit.show_sliced()
            if self._releases_after_backward:
                unit.release(frozen=self.stage.shards_parameters)
        self._used.clear()
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
            self._reducer.end()
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
        if self._in_backward or any(unit.running for unit in self.units):
            raise UsageError(
                "onecopy.gathered cannot be entered while the model is computing: enter it before the forward or "
                "after the backward."
            )
        self.buffers.make_equal()
        self.gathered += 1

    def before_step(self) -> None:
        """The optimizer is about to step."""
        if self._step_is_open:
            return
        if self.mirror:
            raise UsageError(
                "onecopy.shard(mirror=...) has a second rank hold every slice, which onecopy.resilient(model, "
                "optimizer) keeps up to date: step by its run.step(), or shard without mirror=."
            )
        self._begin_step()

    def _begin_step(self) -> None:
        self.come_to_rest()
        self._refuse_nothing_to_do()
        self.versions.step_begins()
        self.ledger.phase = "step"
        self.buffers.before_step()
        self._count_gradients()
        self._step_began = perf_counter()

    # --- what a loss of ranks asks for (`resilience/`)

    def begin_step(self) -> None:
        """Do now what an optimizer's step would send, apart from the barrier, which `open_step` replaces."""
        self._begin_step()

    def open_step(self, agree: Callable[[], None] | None) -> None:
        """Until the step is over, writes are local: ``agree`` returns once all ranks have come here, or raises.

        None: all ranks are known to be here, and read nothing.
        """
        self.versions.step_begins()
        self.versions.open_write(agree)
        self._step_is_open = True

    def close_step(self) -> None:
        """The open step is over, whether an optimizer has stepped or not."""
        if self._step_is_open:
            self._step_is_open = False
            self.versions.step_ends()
            self.micro_batches.stepped()

    def abandon(self) -> None:
        """Give up what is under way, without a message: those with whom it is under way may be gone."""
        for unit in self.units:
            for running in unit.running[::-1]:
                self._undo(running)
            unit.running.clear()
            for bucket in unit.buckets:
                bucket.forget_whole()
        self._in_model_forward = self._records = self._awaits_backward = False
        self._step_is_open = False
        self.versions.retire()
        self._reducer.forget()
        self.micro_batches.forget()
        self._leave_backward()

    def recut(self, layouts: Sequence[Layout], place: int, masters: Sequence[Tensor] | None) -> None:
        """Hold other slices from now on: after `abandon`, before `meet_anew`.

        Args:
            layouts: how each bucket's elements are to lie.
            place: whose slices this rank is to hold.
            masters: what each of them holds, in the master dtype; None: zeros.
        """
        for position, (bucket, layout) in enumerate(zip(self.buckets, layouts, strict=True)):
            bucket.recut(layout, place, None if masters is None else masters[position])
        self._take_parameters()

    def meet_anew(self) -> None:
        """The mesh's axes lead to ranks that have met anew, some of which hold nothing; all of them call it."""
        self.versions = self._make_versions()
        self.buffers.begin_anew()
        self._foresee()
        self._make_reducer()

    def _refuse_nothing_to_do(self) -> None:
        if (
            self._awaits_backward
            and self._trains
            and all(entry.sliced.grad is None for bucket in self.buckets for entry in bucket.entries)
        ):
            self._awaits_backward = False
            raise UsageError(
                "the optimizer was stepped, but no backward has run through the model since its last forward. "
                "Sharded parameters get their gradients from loss.backward() only: torch.autograd.grad(loss, "
                "parameters) and backward(inputs=parameters) do not find them, because the graph holds the whole "
                "parameters instead."
            )

    def step_done(self, optimizer: object, state_bytes: int) -> None:
        """``optimizer``, which holds ``state_bytes`` of states, has stepped: a micro-batch is a step's first again."""
        self._step_is_open = False
        self.versions.step_ends()
        self.micro_batches.stepped()
        self._state_bytes[optimizer] = state_bytes
        if self.stores is None or self.buckets[0].device.type == "cpu":
            self.meter.set("optimizer", sum(self._state_bytes.values()))
        else:
            self.meter.set_off_device("optimizer", sum(self._state_bytes.values()), IN_HOST_MEMORY)
        if (timeline := self.ledger.timeline) is not None:
            timeline.add("optimizer step", "compute", "step", "", self._step_began, perf_counter())
        self.ledger.close_step()

    def come_to_rest(self) -> None:
        """Show slices everywhere if nothing computes, after a forward or backward that ended with an exception too."""
        self._forget_interrupted()
        if self._in_backward and not in_backward():
            self.recover()
        self.versions.lay_out()

    def _forget_interrupted(self) -> None:
        # The outermost last: it has seen what autocast was set to.
        for unit in self.units[::-1]:
            for running in [p for p in unit.running[::-1] if not is_running(p.caller)]:
                unit.running.remove(running)
                self._undo(running)
                unit.show_sliced()
                if self.stage.shards_parameters and not unit.is_computing:
                    unit.release()
        if not self._root.running:
            self._in_model_forward = self._records = False

    def recover(self) -> None:
        """Go on after a backward that raised an error here: with the first micro-batch of a step."""
        try:
            self._reducer.abandon()
        finally:
            self._begin_step_anew()
            self._leave_backward()


def find_engine(model: nn.Module) -> Engine | None:
    """The engine of ``model``, None if it is not what `onecopy.shard` has returned."""
    engine = getattr(model, ENGINE, None)
    return engine if isinstance(engine, Engine) else None
