"""Advice: all options of a job, the one to take with its reason, the runner-up, and what helps when none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import OFFLOADS, Estimate, Job, Option, describe_peak, estimate, least_bytes
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.shape import CHECKPOINTING, Checkpointing
from onecopy.planner.model.tensor import check_degree, degrees
from onecopy.planner.quantities import gigabytes
from onecopy.stage import Stage

Preset = Literal["safe", "fast", "frugal"]

MARGINS: Final[dict[Preset, float]] = {"safe": 0.15, "fast": 0.05, "frugal": 0.05}
"""Share of the device's memory that a preset leaves free."""

_ALIKE: Final = 0.03
"""Options whose speed differs by less are taken for equally fast: the model of time is no better than that."""


@dataclass(frozen=True)
class Wishes:
    """What is fixed beforehand; None leaves it to the search.

    Attributes:
        global_batch: samples in a step over all ranks.
        tensor: M, ranks that share each sample and each block.
        shard: N, ranks that share slices.
    """

    stage: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    checkpointing: Checkpointing | None = None
    tensor: int | None = None
    preset: Preset = "fast"
    shard: int | None = None


@dataclass(frozen=True)
class Remedy:
    """Something that would make it fit.

    Attributes:
        words: what to do.
        found: the estimate afterwards.
        available: whether onecopy can do it today.
    """

    words: str
    found: Estimate
    available: bool


@dataclass(frozen=True)
class Advice:
    """The outcome.

    Attributes:
        estimates: of all options, the fastest that fit first.
        best: the one to take; None if none fits that onecopy can run.
        reason: two sentences.
        runner_up: the best of another kind.
        remedies: when nothing fits, the smallest change first.
        later: the fastest that needs what onecopy does not have yet, if it beats what it has.
    """

    estimates: list[Estimate]
    best: Estimate | None
    reason: str
    runner_up: Estimate | None
    remedies: list[Remedy]
    later: Estimate | None


def options(job: Job, machine: Machine, wishes: Wishes) -> Iterator[Option]:
    """Every option that the wishes leave.

    Raises:
        SettingsError: if the global batch cannot be split so, or the model not over so many tensor ranks.
    """
    if wishes.tensor is not None:
        check_degree(job.shape, machine, wishes.tensor)
    spread = [wishes.tensor] if wishes.tensor else degrees(job.shape, machine)
    if max(spread) == 1 and (wishes.checkpointing or "").startswith("P_a"):
        raise SettingsError(
            f"{wishes.checkpointing} cuts checkpoints over tensor-parallel ranks, and there are none: "
            f"{'give another tensor degree' if wishes.tensor else 'no power of two divides heads and GPUs of a node'}"
        )
    if wishes.checkpointing == "selective" and not job.shape.knows_products:
        raise SettingsError(
            f"what selective recomputation keeps of {job.shape.name} is not known: plan with another --checkpointing, "
            f"or give a factory with example_inputs"
        )
    sizes = job.shape.transformer
    for tensor in spread:
        # Along the sequence activations are cut better, for as many bytes; P_a cuts those that it leaves whole. The
        # vocabulary is cut with it.
        sequence = sizes is not None and tensor > 1 and sizes.vocabulary % tensor == 0
        sequence = sequence and not (wishes.checkpointing or "").startswith("P_a")
        kinds = _kinds(tensor, wishes, sequence=sequence)
        if not job.shape.knows_products:
            kinds = [kind for kind in kinds if kind != "selective"]
        for option in _options_over(tensor, machine, wishes, kinds, sequence=sequence):
            # Offloaded matrices are multiplied on the host, whose rate is known where all is computed there.
            if job.implementation != "muon" or option.offload == "none" or machine.computes_on_host:
                yield option


def _options_over(
    tensor: int, machine: Machine, wishes: Wishes, kinds: Sequence[Checkpointing], *, sequence: bool
) -> Iterator[Option]:
    ranks, neighbours = machine.gpus // tensor, machine.per_node // tensor
    pairs = list(_batches(ranks, wishes))
    for stage in [wishes.stage] if wishes.stage is not None else range(4):
        shards = [ranks]
        if Stage.of(stage).shards_optimizer and 1 < neighbours < ranks:
            shards.append(neighbours)
        if wishes.shard is not None:
            if ranks % wishes.shard:
                raise SettingsError(f"{wishes.shard} ranks that share slices must divide the {ranks} that there are")
            shards = [wishes.shard if Stage.of(stage).shards_optimizer else ranks]
        offloads = [o for o in OFFLOADS if _offloadable(stage, o)] if tensor == 1 else OFFLOADS[:1]
        if machine.computes_on_host:
            offloads = [o for o in offloads if not o.endswith("cpu")]
        for micro_batch, accumulate in pairs:
            for checkpointing in kinds:
                for offload in offloads if checkpointing in ("off", "selective", "units") else OFFLOADS[:1]:
                    for shard in shards:
                        yield Option(
                            stage,
                            micro_batch,
                            accumulate,
                            checkpointing,
                            offload,
                            shard,
                            ranks // shard,
                            tensor=tensor,
                            sequence=sequence,
                        )


def _kinds(tensor: int, wishes: Wishes, *, sequence: bool) -> list[Checkpointing]:
    """Without a tensor axis there is nothing to cut checkpoints over; with one, moving them whole is never better."""
    kinds: list[Checkpointing] = [wishes.checkpointing] if wishes.checkpointing else list(CHECKPOINTING)
    if tensor == 1 or sequence:
        return [kind for kind in kinds if not kind.startswith("P_a")]
    return [kind for kind in kinds if kind != "units+cpu" or wishes.checkpointing]


def advise(
    job: Job, machine: Machine, wishes: Wishes | None = None, progress: Callable[[int, int], None] | None = None
) -> Advice:
    """Search all options.

    Args:
        progress: told how many options of how many have been looked at.

    Raises:
        SettingsError: if the global batch cannot be split over the ranks.
    """
    wishes = wishes or Wishes()
    chosen = _worth_a_look(job, machine, options(job, machine, wishes))
    found = []
    for option in chosen:
        found.append(estimate(job, machine, option))
        if progress is not None:
            progress(len(found), len(chosen))
    room = (1 - MARGINS[wishes.preset]) * machine.gpu.memory
    fitting = [e for e in found if e.fits and e.peak <= room]
    allowed = _sharding_where_there_are_ranks([e for e in fitting if e.available])
    ready = _undominated(allowed)
    found.sort(
        key=lambda e: (
            not (e.fits and e.peak <= room),
            not e.available,
            -e.tokens_per_second if e.fits and e.peak <= room else 0.0,
            e.peak,
        )
    )
    if not ready:
        return Advice(found, None, _why_nothing(found, room), None, _remedies(job, machine, wishes, found), None)
    best = _choose(ready, wishes.preset, machine)
    others = [e for e in allowed if e.option.kind != best.option.kind]
    runner_up = _choose(others, wishes.preset, machine) if others else None
    faster = [e for e in fitting if e.tokens_per_second > best.tokens_per_second * (1 + _ALIKE)]
    later = max(faster, key=lambda e: e.tokens_per_second, default=None) if wishes.preset != "frugal" else None
    if later is not None and later.available:
        later = None
    return Advice(found, best, _reason(best, found, runner_up, len(fitting)), runner_up, [], later)


def _worth_a_look(job: Job, machine: Machine, every: Iterable[Option]) -> list[Option]:
    """Options that may fit; of each kind of which none may, the first, so that the table can say so.

    Where none at all may, of each stage the one that comes nearest: a model so large takes long to go through.
    """
    kept: list[Option] = []
    too_large: dict[object, Option] = {}
    for option in every:
        if least_bytes(job, option) <= machine.gpu.memory:
            kept.append(option)
        else:
            too_large.setdefault(option.kind, option)
    if not kept:
        nearest = sorted(too_large.values(), key=lambda option: (bool(option.missing), least_bytes(job, option)))
        return list({option.stage: option for option in reversed(nearest)}.values())
    seen = {option.kind for option in kept}
    return kept + [option for kind, option in too_large.items() if kind not in seen]


def _batches(ranks: int, wishes: Wishes) -> Iterator[tuple[int, int]]:
    total = wishes.global_batch
    if total is None:
        sizes = [wishes.micro_batch] if wishes.micro_batch else [1, 2, 4, 8, 16, 32]
        yield from ((size, 1) for size in sizes)
        return
    if total % ranks:
        below, above = total // ranks * ranks, (total // ranks + 1) * ranks
        nearest = f"the nearest that can are {below} and {above}" if below else f"the smallest that can is {above}"
        raise SettingsError(
            f"a global batch of {total} cannot be split over {ranks} ranks; {nearest}, or let ranks share samples with "
            f"a tensor degree"
        )
    share = total // ranks
    if wishes.micro_batch:
        if share % wishes.micro_batch:
            raise SettingsError(
                f"{share} samples a rank ({total} over {ranks} ranks) cannot be split into micro-batches of "
                f"{wishes.micro_batch}; take a divisor of {share}"
            )
        yield wishes.micro_batch, share // wishes.micro_batch
        return
    yield from ((size, share // size) for size in range(1, min(share, 64) + 1) if share % size == 0)


def _offloadable(stage: int, offload: str) -> bool:
    if offload == "none":
        return True
    kind = Stage.of(stage)
    return kind.shards_parameters if offload.startswith("parameters") else kind.shards_optimizer


def _sharding_where_there_are_ranks(ready: list[Estimate]) -> list[Estimate]:
    """Without stages 1 to 3 on one rank, which has nothing to share: they are left where stage 0 does not fit."""

    def alone(found: Estimate) -> bool:
        option = found.option
        return option.shard * option.replicate == 1 and option.stage > 0 and option.offload == "none"

    return [found for found in ready if not alone(found)] or ready


def _undominated(ready: Sequence[Estimate]) -> list[Estimate]:
    """Options that no other beats: none is as fast, holds as little on device and host, and is better in one of it."""
    front: list[Estimate] = []
    # The fastest first: only what came before can dominate.
    for found in sorted(ready, key=lambda e: (-e.tokens_per_second, e.peak, e.host, e.option.stage)):
        if not any(one.peak <= found.peak and one.host <= found.host for one in front):
            front.append(found)
    return front


def _choose(ready: Sequence[Estimate], preset: Preset, machine: Machine) -> Estimate:
    """The fastest; of those as fast, what sends least ("fast") or holds least ("safe"). "frugal": memory first."""
    step = 0.02 * machine.gpu.memory
    if preset == "frugal":
        return min(ready, key=lambda e: (e.peak // step, -e.tokens_per_second))
    fastest = max(e.tokens_per_second for e in ready)
    alike = [e for e in ready if e.tokens_per_second >= fastest * (1 - _ALIKE)]
    if preset == "fast":
        return min(alike, key=lambda e: (e.bytes_sent + e.activations_sent, e.host, e.peak))
    return min(alike, key=lambda e: (e.peak // step, e.option.stage, -e.tokens_per_second))


def _reason(best: Estimate, found: Sequence[Estimate], runner_up: Estimate | None, count: int) -> str:
    first = (
        f"S{best.option.words()[1:]} is the pick of {count} options that fit: "
        f"{best.speed} at {describe_peak(best)}"
        f"{f', limited by {best.limited_by}' if best.rate else ''}."
    )
    below = [e for e in found if e.option.stage == best.option.stage - 1 and e.available]
    if below and not any(e.fits for e in below):
        least = min(below, key=lambda e: e.peak)
        return f"{first} Stage {least.option.stage} would need {gigabytes(least.peak)} at the least."
    if runner_up is None:
        return f"{first} Nothing else fits."
    slower = best.tokens_per_second / runner_up.tokens_per_second - 1
    if not best.rate:
        slower = 0.0
    speed = (
        f"{1 + slower:,.0f} times slower"
        if slower > 1
        else f"{slower:.0%} slower"
        if slower > 0.005
        else f"{-slower:.0%} faster"
        if slower < -0.005
        else "as fast"
    )
    less = runner_up.peak - best.peak
    alike = abs(less) < 0.005 * best.limit
    memory = "holds as much" if alike else f"holds {gigabytes(abs(less))} {'more' if less > 0 else 'less'}"
    return f"{first} The runner-up, {runner_up.option.words()}, is {speed} and {memory}."


def _why_nothing(found: Sequence[Estimate], room: float) -> str:
    ready = [e for e in found if e.available]
    least = min(ready, key=lambda e: e.peak)
    if least.peak <= room:
        return (
            f"Nothing fits: the devices would hold {least.option.words()} ({gigabytes(least.peak)}), but a host "
            f"has {gigabytes(least.host_limit or 0)} where {gigabytes(least.host)} are needed. See the remedies."
        )
    return (
        f"Nothing fits: the least that onecopy can do, {least.option.words()}, holds {gigabytes(least.peak)} in "
        f"{least.peak_phase} where {gigabytes(room)} may be used. See the remedies below, the smallest change first."
    )


_NODE: Final = 8
"""GPUs of a node, as most are built."""


def _grown(machine: Machine, times: int) -> Machine:
    """The machine with so many times the GPUs: nodes are filled up to `_NODE` before there are more of them."""
    gpus, nodes = machine.gpus * times, machine.nodes
    while gpus / nodes > max(_NODE, machine.per_node) or gpus % nodes:
        nodes += 1
    return replace(machine, gpus=gpus, nodes=nodes)


def _remedies(job: Job, machine: Machine, wishes: Wishes, found: Sequence[Estimate]) -> list[Remedy]:
    """What would make it fit, the smallest change first; each is tried and not guessed."""
    room = (1 - MARGINS[wishes.preset]) * machine.gpu.memory
    remedies: list[Remedy] = []

    def attempt(words: str, job: Job, machine: Machine, wishes: Wishes) -> bool:
        try:
            ready = [
                option
                for option in options(job, machine, wishes)
                if not option.missing and least_bytes(job, option) <= room
            ]
        except SettingsError:
            return False
        if not ready:
            return False
        # More samples at once hold more, but for the gradients that one micro-batch a step does not keep: where none of
        # these fits, none does.
        smallest = min(option.micro_batch for option in ready)
        least = [option for option in ready if option.micro_batch == smallest or option.accumulate == 1]
        fitting = [e for e in (estimate(job, machine, option) for option in least) if e.fits and e.peak <= room]
        if fitting:
            others = (estimate(job, machine, option) for option in ready if option not in least)
            fitting += [e for e in others if e.fits and e.peak <= room]
            best = max(fitting, key=lambda e: e.tokens_per_second)
            remedies.append(Remedy(f"{words}: {best.option.words()}", best, available=True))
        return bool(fitting)

    fused, lean = replace(job, implementation="fused"), replace(job, precision="bf16-lean")
    if job.implementation not in ("fused", "muon"):
        attempt("AdamW fused", fused, machine, wishes)
    if job.loss_bytes is not None and job.shape.transformer is not None and job.shape.transformer.chunks:
        attempt("a loss in chunks (onecopy.chunk_loss)", replace(job, loss_bytes=None), machine, wishes)
    if wishes.checkpointing == "off" and job.shape.knows_products:
        attempt("recompute what is cheap", job, machine, replace(wishes, checkpointing="selective"))
    if wishes.checkpointing in ("off", "selective"):
        attempt("checkpoint activations", job, machine, replace(wishes, checkpointing="units"))
    if job.precision == "bf16":
        attempt("bf16-lean, whose gradients are summed in bf16", lean, machine, wishes)
        if job.implementation not in ("fused", "muon"):
            attempt("bf16-lean and AdamW fused", replace(lean, implementation="fused"), machine, wishes)
    if wishes.stage is not None and wishes.stage < 3:
        attempt("raise the stage", job, machine, replace(wishes, stage=3))
    if wishes.tensor == 1 and job.implementation != "muon":
        attempt("spread blocks over ranks", job, machine, replace(wishes, tensor=None))
    if wishes.micro_batch is not None and wishes.micro_batch > 1:
        attempt("a smaller micro-batch", job, machine, replace(wishes, micro_batch=1))
    for shorter in (job.sequence // 2, job.sequence // 4):
        if (
            job.shape.transformer
            and shorter
            and attempt(f"sequences of {shorter} tokens", replace(job, sequence=shorter), machine, wishes)
        ):
            break
    for times in (2, 4, 8, 16, 32, 64):
        more = _grown(machine, times)
        batch = None if wishes.global_batch is None else wishes.global_batch * times
        words = f"{more.gpus} GPUs" + (f", on {more.nodes} nodes" if more.nodes > 1 else " in one node")
        if attempt(words, job, more, replace(wishes, global_batch=batch)):
            break
    ready = [e for e in found if e.available]
    if on_device := [e for e in ready if e.peak <= room]:
        modest = min(on_device, key=lambda e: e.host)
        larger = estimate(job, replace(machine, host_memory=modest.host), modest.option)
        remedies.append(Remedy(f"hosts of {gigabytes(modest.host)}: {modest.option.words()}", larger, available=True))
    elif on_host := [e for e in ready if e.host_limit is None or e.host <= e.host_limit]:
        least = min(on_host, key=lambda e: e.peak)
        needed = least.peak / (1 - MARGINS[wishes.preset])
        larger = estimate(job, replace(machine, gpu=machine.gpu._replace(memory=needed)), least.option)
        remedies.append(Remedy(f"GPUs of {gigabytes(needed)}: {least.option.words()}", larger, available=True))
    later = [e for e in found if not e.available and e.fits and e.peak <= room]
    for name in dict.fromkeys(e.option.missing for e in sorted(later, key=lambda e: -e.tokens_per_second)):
        best = max((e for e in later if e.option.missing == name), key=lambda e: e.tokens_per_second)
        words = f"{' and '.join(name)}, which onecopy does not have yet: {best.option.words()}"
        remedies.append(Remedy(words, best, available=False))
    return remedies
