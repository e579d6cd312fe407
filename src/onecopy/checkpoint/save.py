"""save: a training run's state by name, whatever shards it; `writing.py` makes a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onecopy.checkpoint.finite import first_not_finite
from onecopy.checkpoint.group import Group
from onecopy.checkpoint.manifest import LARGEST
from onecopy.checkpoint.names import Named, check_has_values, name_tensors
from onecopy.checkpoint.optimizer import States, as_list, describe_kinds, take_states, whole_states
from onecopy.checkpoint.random import pack, take_generators
from onecopy.checkpoint.save_pretrained import config_files
from onecopy.checkpoint.writing import Contents, Saving, write
from onecopy.comm.objects import bytes_of
from onecopy.errors import NotFiniteError, SettingsError, UsageError
from onecopy.sharding.engine.engine import find_engine
from onecopy.sharding.model.ignored import is_ignored
from onecopy.sharding.setup.api import engine_of, phase_of
from onecopy.sharding.tensor.sliced import SlicedTensor
from onecopy.untrusted import reason


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    rank_extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
    assets: Iterable[str | Path] = (),
    allow_not_finite: bool = False,
    trainable_only: bool = False,
) -> Saving:
    """Save a training run, at any moment outside of forward and backward. Every rank calls it; all see one file system.

    Gradients are not saved. After a save between two micro-batches, training continues with the gradients that it has.
    A run that resumes from this save starts the step again.

    The model may be sharded by onecopy at any stage, plain, in DDP or under fully_shard. Parameters are saved in the
    master dtype, by name, with their true shapes, once; so are optimizer states and persistent buffers (the first
    rank's). The states of each rank's random number generators are saved too. Traffic: plans and results, no tensors.

    Args:
        directory: the directory that holds all of this run's checkpoints.
        model: the model whose parameters and persistent buffers are saved.
        optimizer: one, or several that hold different parameters. None: weights alone.
        scheduler, scaler: anything with `state_dict()`, or a list of such, as a scheduler for each optimizer.
        extra: values of your own, such as the position in the data: plain types and tensors. The first rank's are
            saved, and `load` returns them.
        rank_extra: values of this rank's own. `load` returns them to this rank, at the same number of ranks.
        step: number of the checkpoint. None: one more than that of the newest checkpoint.
        keep: how many checkpoints stay; older ones are deleted. None keeps all.
        background: copy this rank's share (`Saving.copied` bytes), return, and write while training continues. A second
            save waits for the first one, so there is never more than one copy.
        assets: small files to keep with the checkpoint for `onecopy export`, such as a tokenizer's. The config of a
            model of transformers is always kept.
        allow_not_finite: save parameters and optimizer states that hold nan or inf. By default they are an error, so
            that they do not replace the last good checkpoint.
        trainable_only: leave out frozen parameters, whose values come from elsewhere (LoRA). On `load` the model then
            keeps its own frozen parameters.

    Returns:
        The save. Without ``background`` it has succeeded already. `Saving.wait()` returns the checkpoint's path.

    Raises:
        SettingsError: for a setting that cannot work.
        NotFiniteError: if a parameter or optimizer state holds nan or inf; names the first one and the rank.
        UsageError: if a value cannot be saved, or nothing is trainable.
        CheckpointError: if it could not be saved; earlier checkpoints are untouched.
    """
    if keep is not None and keep < 1:
        raise SettingsError(f"keep must be at least 1, so that the checkpoint being saved stays; found {keep}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < LARGEST):
        raise SettingsError(f"step must be a whole number, 0 or more and below 2**53; found {step!r}")
    group = Group.current()
    group.finish_background()
    everything = name_tensors(model)
    check_has_values(everything)
    named = _without_frozen(everything) if trainable_only else everything
    contents: Contents = {}
    job: list[bytes] = []
    kept = config_files(model)

    optimizers = as_list(optimizer)
    elsewhere: States = {}

    def collect() -> None:
        found, rest = _collect(named, everything, optimizers, elsewhere, group.rank)
        if _holds_slice(extra):
            raise UsageError(
                "extra holds slices of sharded tensors (an onecopy.ema, a parameter, a state), but only the first "
                "rank's extra is saved: pass them as rank_extra=, which keeps each rank's."
            )
        rest |= {
            "extra": extra,
            "trainable_only": trainable_only,
            **{n: _state_of(o) for n, o in (("scheduler", scheduler), ("scaler", scaler)) if o},
        }
        of_rank = _packed({"generators": take_generators(), "extra": rank_extra}, "rank_extra")
        if not allow_not_finite:
            _check_finite(found)
        contents.update(found, ranks={str(group.rank): of_rank})
        job.append(bytes_of(_packed(rest, "extra, or the state of the scheduler or scaler,")))
        if group.rank == 0:
            kept.update({Path(file).name: Path(file).read_bytes() for file in assets})

    with phase_of(model, "save"):
        if (engine := find_engine(model)) is not None:
            engine.buffers.make_equal()
            if engine.lays_whole and optimizers:
                owned = group.together("collecting what to save", lambda: whole_states(optimizers, everything))
                elsewhere.update({name: states for own in owned for name, states in own.items()})
        # What one rank cannot save, no rank goes on with.
        group.together("collecting what to save", collect)
        return write(
            Path(directory),
            contents,
            {f"model.{alias}": f"model.{name}" for alias, name in named.aliases.items()},
            job[0],
            kept,
            step=step,
            keep=keep,
            background=background,
            saved_by={"parameters": sum(p.numel() for p in named.parameters.values()), **_describe(model, optimizers)},
        )


def _state_of(part: Any) -> Any:
    return [one.state_dict() for one in part] if isinstance(part, list | tuple) else part.state_dict()


def _collect(
    named: Named, everything: Named, optimizers: Sequence[Optimizer], elsewhere: Mapping[str, Any], rank: int
) -> tuple[Contents, dict[str, Any]]:
    # Buffers and ignored parameters may differ between ranks; the first one's are kept.
    shared = {name: p for name, p in named.parameters.items() if rank == 0 or not is_ignored(p)}
    model: dict[str, Any] = {**shared, **(named.buffers if rank == 0 else {})}
    contents: Contents = {"model": model}
    job: dict[str, Any] = {"aliases": dict(named.aliases), "objects": dict(named.objects)}
    if optimizers:
        tensors, job["optimizer"] = take_states(optimizers, everything)
        job["optimizer"]["states"] |= elsewhere
        contents["optimizer"] = {"state": {name: own for name, own in tensors.items() if name in shared}}
    return contents, job


def _without_frozen(named: Named) -> Named:
    parameters = {name: p for name, p in named.parameters.items() if p.requires_grad}
    if not parameters:
        raise UsageError(
            "trainable_only=True would save no parameter, because all of the model's are frozen: leave it out"
        )
    there = {*parameters, *named.buffers}
    aliases = {alias: name for alias, name in named.aliases.items() if name in there}
    return Named(parameters, named.buffers, aliases, named.objects)


def _check_finite(contents: Contents) -> None:
    states = contents.get("optimizer", {}).get("state", {})
    parts = [
        *(
            (f"parameter {name!r}", tensor)
            for name, tensor in contents["model"].items()
            if isinstance(tensor, nn.Parameter)
        ),
        *((f"state {key!r} of {name!r}", tensor) for name, own in states.items() for key, tensor in own.items()),
    ]
    if (name := first_not_finite(parts)) is not None:
        raise NotFiniteError(
            f"{name} holds nan or inf, and a checkpoint of it would take the place of a good one: go back to the "
            "last checkpoint; or pass allow_not_finite=True"
        )


def _holds_slice(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_slice, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_slice, value))
    return isinstance(value, SlicedTensor)


def _packed(value: Any, what: str) -> Tensor:
    try:
        return pack(value)
    except Exception as error:
        raise UsageError(
            f"{what} holds a value that a checkpoint does not keep, because loading it could run code: give only "
            f"numbers, strings, tensors, and lists, tuples and dicts of them ({reason(error)})"
        ) from None


def _describe(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What `onecopy inspect` says about the run that saved."""
    facts: dict[str, Any] = {
        "model": type(model).__name__,
        "optimizer": describe_kinds(optimizers),
    }
    kinds: set[type] = {type(parameter) for parameter in model.parameters()}
    if SlicedTensor in kinds:
        engine = engine_of(model)
        mesh = {"shard": engine.mesh.shard.size, "replicate": engine.mesh.copies}
        return facts | {"sharded_by": "onecopy", "stage": engine.stage.number} | mesh
    return facts | {"sharded_by": "fully_shard" if DTensor in kinds else None}
