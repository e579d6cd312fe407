"""What `onecopy plan` does: settings into a job and a machine, the search, and everything that is shown of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress

from onecopy.cli import plan_tables as tables
from onecopy.errors import SettingsError
from onecopy.integrations.translation import Translation
from onecopy.planner.answer.advice import Preset, Wishes, advise
from onecopy.planner.answer.describe import describe
from onecopy.planner.answer.errors import expected
from onecopy.planner.answer.estimate import Job
from onecopy.planner.answer.paste import as_dict, as_json, config_toml, shard_call
from onecopy.planner.answer.quantised import eight_bit
from onecopy.planner.answer.redundancy import redundancy
from onecopy.planner.answer.survival import RANKS, Way, losses_a_day, ways
from onecopy.planner.answer.sweep import crossover, curves, parse_range, thresholds
from onecopy.planner.answer.zero_r import CONFIGURATIONS, Configured, configure, paper
from onecopy.planner.formulas.activations import LOSS_BYTES
from onecopy.planner.machine.doubts import assumed, doubts
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.shape import CHECKPOINTING, Shape, from_sizes
from onecopy.planner.model.tensor import check_degree, degrees
from onecopy.planner.quantities import parse_bytes, parse_rate
from onecopy.untrusted import read_json


@dataclass(frozen=True)
class Request:
    """The options of `onecopy plan`, as given."""

    model: str | None
    layers: int | None
    hidden: int | None
    heads: int | None
    vocabulary: int
    seq: int | None
    micro_batch: int | None
    global_batch: int | None
    stage: int | None
    checkpointing: str | None
    tensor: int | None
    precision: str | None
    optimizer: str
    loss: str
    gpus: int | None
    nodes: int
    gpu: str
    tflops: float | None
    gpu_memory: str | None
    host_memory: str | None
    link: str
    intra: str | None
    here: bool
    calibration: bool
    preset: str
    zero_r: bool
    sweep: str | None
    copies: int | None
    mirror: bool
    losses_a_day: float | None
    simulate: bool
    from_deepspeed: Path | None
    from_accelerate: Path | None
    rows: int
    as_json: bool
    html: Path | None


def run(request: Request) -> bool:
    """Plan, and show it. Returns whether something fits.

    Raises:
        SettingsError: if the settings cannot work.
    """
    console = Console(stderr=request.as_json)
    if request.rows < 1:
        raise SettingsError(f"--rows must be positive; found {request.rows}")
    if request.html is not None and (request.html.is_dir() or not request.html.parent.is_dir()):
        raise SettingsError(f"--html must be a file in a directory that exists; found {str(request.html)!r}")
    translation = _translate(request)
    if request.model is None and request.layers is None and translation is not None:
        console.print(translation.text(), markup=False, highlight=False, soft_wrap=True)
        return True
    if request.model is None and request.layers is None and request.zero_r:
        return _paper(request, console)
    shape = _shape(request)
    machine = _machine(request, console)
    job, wishes = _job(request, shape, machine, translation)
    notes = _notes(request, machine, shape, job.precision) + _overrides(request, translation)
    if job.implementation == "muon":
        notes.append(_of_muon(job, machine))
    configured = _configured(job, machine, wishes) if request.zero_r else []
    with _shown_progress() as progress:
        advice = advise(job, machine, wishes, progress)
    swept = None
    chosen = advice.best or min(advice.estimates, key=lambda e: (not e.available, e.peak))
    if request.sweep or request.html:
        low, high = parse_range(request.sweep)[1:] if request.sweep else (1.25e9, 1e11)
        swept = curves(job, machine, chosen.option, low, high), crossover(job, machine, chosen.option, low, high)
    hurts = thresholds(job, machine, chosen.option) if request.sweep else []
    spared = redundancy(job, machine, chosen, request.copies) if request.copies is not None else None
    simulated = _simulate(request, job, chosen.option) if request.simulate else None
    if request.losses_a_day is not None and not request.mirror:
        raise SettingsError("--losses-a-day says something beside --mirror alone")
    survival = _survival(request, job, machine, chosen.seconds.total) if request.mirror else {}

    if request.as_json:
        result: dict[str, Any] = as_dict(job, machine, advice)
        result["notes"] = notes
        result["shard_call"] = shard_call(job, chosen) if advice.best else None
        trains = advice.best and job.shape.transformer
        result["config"] = config_toml(job, machine, chosen, _train_path(request)) if trains else None
        if translation is not None:
            result["translation"] = translation.text().splitlines()
        if swept is not None:
            result["sweep"] = [{"stage": curve.stage, "points": curve.points} for curve in swept[0]]
            result["crossover"] = swept[1]
            result["thresholds"] = [{"quantity": t.quantity, "hurts": t.hurts, "at": t.at} for t in hurts]
        if spared is not None:
            result["copies"] = spared.__dict__
        if survival:
            result["survival"] = {ranks: [way.__dict__ for way in found] for ranks, found in survival.items()}
        if configured:
            result["zero_r"] = [one.as_dict() for one in configured]
        if simulated is not None:
            result["simulated"] = simulated.as_dict()
        sys.stdout.write(as_json(result) + "\n")
    else:
        if translation is not None:
            console.print(translation.text(), markup=False, highlight=False, soft_wrap=True)
        tables.print_plan(console, job, machine, advice, request.rows, notes)
        if advice.best is not None:
            tables.print_paste(console, job, machine, advice.best, _train_path(request))
        if request.sweep and swept is not None:
            tables.print_sweep(console, swept[0], swept[1], hurts)
        if spared is not None:
            tables.print_redundancy(console, spared)
        if survival:
            tables.print_survival(console, survival, request.losses_a_day)
        if configured:
            tables.print_zero_r(console, configured)
        if simulated is not None:
            tables.print_simulated(console, simulated)
    if request.html is not None and swept is not None:
        _write_page(request.html, job, machine, advice, swept[0], swept[1], console)
    return advice.best is not None


@contextmanager
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error while options are looked at; it goes when they have been."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("options")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _paper(request: Request, console: Console) -> bool:
    """The configurations of ZeRO-R as the paper ran them."""
    found = paper()
    if request.as_json:
        json.dump({"zero_r": [one.as_dict() for one in found]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        console.print("400 V100 of 32 GB on 25 nodes, tensor 16, 16 samples of 1,024 tokens, fp16", highlight=False)
        tables.print_zero_r(console, found)
    return True


def _configured(job: Job, machine: Machine, wishes: Wishes) -> list[Configured]:
    """The configurations of ZeRO-R, over as many tensor ranks as were asked for or can be."""
    sizes = job.shape.transformer
    tensor = wishes.tensor or degrees(job.shape, machine)[-1]
    if sizes is None or tensor == 1:
        raise SettingsError("--zero-r needs tensor-parallel ranks to cut checkpoints over, and there are none")
    check_degree(job.shape, machine, tensor)
    return [configure(name, job, sizes, machine, wishes.micro_batch or 1, tensor) for name in CONFIGURATIONS]


def _shape(request: Request) -> Shape:
    if request.layers is not None or request.hidden is not None:
        if request.model is not None:
            raise SettingsError("give either MODEL or --layers and --hidden, not both")
        if request.layers is None or request.hidden is None:
            raise SettingsError("--layers and --hidden go together")
        return from_sizes(request.layers, request.hidden, heads=request.heads, vocabulary=request.vocabulary)
    if request.model is None:
        raise SettingsError("give a MODEL, or --layers and --hidden; `onecopy plan --help` says what it may be")
    return describe(request.model, sequence=request.seq)


def _machine(request: Request, console: Console) -> Machine:
    host = parse_bytes(request.host_memory) if request.host_memory else None
    if request.here:
        from onecopy.planner.machine.calibration import read_calibration
        from onecopy.planner.machine.here import look

        found, words = look(request.gpus)
        console.print(words, markup=False, highlight=False, soft_wrap=True)
        if request.calibration and (known := read_calibration()) is not None:
            found = known.applied(found)
            console.print(
                f"calibrated by {known.probes:.0f} probes of `onecopy tune`: {known.words()}; --no-calibration leaves "
                f"it out",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        memory = parse_bytes(request.gpu_memory) if request.gpu_memory else found.gpu.memory
        return replace(found, gpu=found.gpu._replace(memory=memory), host_memory=host or found.host_memory)
    if request.tflops is not None and not 0 < request.tflops < inf:
        raise SettingsError(f"--tflops must be a positive number; found {request.tflops:g}")
    if request.gpus is None:
        raise SettingsError("--gpus is needed: how many there are on all nodes (or --here to read this machine)")
    gpu = gpu_of(
        request.gpu,
        memory=parse_bytes(request.gpu_memory) if request.gpu_memory else None,
        intra=parse_rate(request.intra) if request.intra else None,
        peak=1e12 * request.tflops if request.tflops else None,
    )
    return Machine(request.gpus, gpu, request.nodes, parse_rate(request.link), host)


def _notes(request: Request, machine: Machine, shape: Shape, precision: str) -> list[str]:
    """What the plan takes for granted of the machine, and what of it is doubtful; one that was read is not."""
    if request.here:
        return [expected(machine, shape), *doubts(machine, machine.gpu, precision)]
    return [assumed(machine), expected(machine, shape), *doubts(machine, gpu_of(request.gpu), precision)]


def _of_muon(job: Job, machine: Machine) -> str:
    """How evenly whole matrices lie on all ranks."""
    found, matrices = job.balance(machine.gpus), job.shape.matrices
    return (
        f"Muon has {len(matrices):,} matrices, each whole on one of {machine.gpus} ranks: the dearest rank computes "
        f"{found.computes:.2f} times the mean of them, the largest holds {found.holds:.2f} times the mean; "
        f"{job.optimizer_tensors:.2f} optimizer states for each parameter"
    )


def _overrides(request: Request, translation: Translation | None) -> list[str]:
    """What of the file does not stand, since an option says otherwise; a line each."""
    if translation is None:
        return []
    pairs = {"stage": translation.stage, "precision": translation.precision, "micro_batch": translation.micro_batch}
    return [
        f"--{name.replace('_', '-')} {asked} stands, where the file says {said}"
        for name, said in pairs.items()
        if (asked := getattr(request, name)) is not None and said is not None and asked != said
    ]


def _job(request: Request, shape: Shape, machine: Machine, translation: Translation | None) -> tuple[Job, Wishes]:
    preset: Preset = _one_of("preset", request.preset, get_args(Preset))
    asked = request.precision or (translation and translation.precision) or "bf16"
    precision = _one_of("precision", asked, ("bf16", "bf16-lean", "fp16", "fp32"))
    if "8bit" in request.optimizer.replace("-", "").replace("_", ""):
        raise SettingsError(eight_bit(sum(unit.parameters for unit in shape.units)))
    optimizer = _one_of("optimizer", request.optimizer, ("fused", "foreach", "for-loop", "muon"))
    checkpointing = request.checkpointing and _one_of("checkpointing", request.checkpointing, CHECKPOINTING)
    for name, value in (
        ("seq", request.seq),
        ("micro-batch", request.micro_batch),
        ("global-batch", request.global_batch),
        ("tensor", request.tensor),
    ):
        if value is not None and value < 1:
            raise SettingsError(f"--{name} must be positive; found {value}")
    sizes = shape.transformer
    if sizes is not None and sizes.sequence is not None and (request.seq or 0) > sizes.sequence:
        raise SettingsError(f"--seq is {request.seq} but the model has {sizes.sequence} positions")
    if request.seq is not None and shape.rate == "samples":
        raise SettingsError(f"--seq says nothing about {shape.name}, whose samples have no tokens; leave it out")
    chunked = _one_of("loss", request.loss, ("chunked", "whole")) == "chunked" and sizes is not None and sizes.chunks
    loss_bytes = None if chunked else LOSS_BYTES
    job = Job(shape, _sequence(shape, request.seq), precision, optimizer, loss_bytes)
    # Ranks are simulated without a tensor axis.
    if optimizer == "muon" and (request.tensor or 1) > 1:
        raise SettingsError("--optimizer muon needs whole matrices, which --tensor cuts over ranks: leave one away")
    tensor = request.tensor or (1 if request.simulate or optimizer == "muon" else None)
    wishes = Wishes(request.stage, request.micro_batch, request.global_batch, checkpointing or None, tensor, preset)
    if translation is not None:
        batch = translation.global_batch
        if batch is None and translation.micro_batch:
            batch = translation.micro_batch * (translation.accumulate or 1) * machine.gpus
        wishes = replace(
            wishes,
            stage=translation.stage if wishes.stage is None else wishes.stage,
            shard=translation.shard,
            checkpointing=wishes.checkpointing or ("units" if translation.checkpointing else None),
            # These settings know no tensor axis.
            tensor=wishes.tensor or 1,
            micro_batch=wishes.micro_batch or translation.micro_batch,
            global_batch=wishes.global_batch or batch,
        )
    return job, wishes


def _sequence(shape: Shape, asked: int | None) -> int:
    """Tokens of a sample: as asked, as counted, or 2048 if the model has so many positions; 1 where there are none."""
    if shape.transformer is not None:
        return asked or min(2048, shape.transformer.sequence or 2048)
    return (shape.work.tokens if shape.work else None) or 1


def _one_of(name: str, value: str, known: tuple[Any, ...]) -> Any:
    if value not in known:
        close = get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise SettingsError(f"--{name} must be one of {', '.join(known)}; found {value!r}, did you mean {close!r}?")
    return value


def _translate(request: Request) -> Translation | None:
    if request.from_deepspeed and request.from_accelerate:
        raise SettingsError("give either --from-deepspeed or --from-accelerate, not both")
    if request.from_deepspeed:
        from onecopy.integrations.deepspeed import from_deepspeed

        return from_deepspeed(request.from_deepspeed, _config_of(request.model))
    if request.from_accelerate:
        from onecopy.integrations.accelerate import from_accelerate

        return from_accelerate(request.from_accelerate)
    return None


def _config_of(model: str | None) -> Any:
    """Something with the hidden size of a transformers config, for "auto" values."""
    path = Path(model or "")
    file = path / "config.json" if path.is_dir() else path
    if model is None or not file.is_file():
        return None
    try:
        values = read_json(file, follow=True)
    except (OSError, ValueError):
        return None
    from types import SimpleNamespace

    return SimpleNamespace(**values)


def _train_path(request: Request) -> str | None:
    """MODEL if `onecopy train` can take it too."""
    return request.model if request.model and Path(request.model).exists() else None


def _survival(request: Request, job: Job, machine: Machine, step: float) -> dict[int, list[Way]]:
    """For each number of ranks."""
    if request.losses_a_day is not None and not 0 <= request.losses_a_day < inf:
        raise SettingsError(f"--losses-a-day must be a number, 0 or more; found {request.losses_a_day:g}")
    widths = job.widths
    return {
        ranks: ways(
            float(job.shape.parameters),
            ranks,
            losses=losses_a_day(ranks) if request.losses_a_day is None else request.losses_a_day,
            step=step,
            bandwidth=machine.link,
            gpus_a_node=max(1, machine.gpus // machine.nodes),
            optimizer_bytes=3 * widths.master,
            gradient_bytes=widths.accumulate,
        )
        for ranks in RANKS
    }


def _simulate(request: Request, job: Job, option: Any) -> Any:
    from onecopy.planner.answer.compare import compare

    file = Path(request.model or "")
    file = file / "config.json" if file.is_dir() else file
    return compare(job, option, config=file if file.is_file() else None, factory=request.model)


def _write_page(
    path: Path, job: Job, machine: Machine, advice: Any, swept: Any, crossing: float | None, console: Console
) -> None:
    from onecopy.planner.answer.page import render

    text = render(job, machine, advice, swept, crossing)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {str(path)!r}: {error.strerror}") from None
    console.print(f"{path}  {len(text.encode()) / 1e3:,.0f} kB", markup=False, highlight=False, soft_wrap=True)
