"""How a rank's memory, traffic and overhead, and a step's time, go with N = 8 … 4096: as one self-contained HTML page.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json --html benchmarks/results/scaling.html

Bytes and overhead: the real engine on torch's fake process group (`fake.py`), as rank 0 of N: its meter and its ledger
count bytes, and nothing is sent. Curves are ZeRO §5 and §7 for bf16 with K = 12. What takes a point off its curve:

- gradients are accumulated in fp32 (stage 0 holds 18Ψ, not 16Ψ), and leave before the optimizer steps (stage 1 holds
  what stage 2 does);
- the peak has units that are whole while they compute, with their gradients: a constant, which shows at large N;
- padding, once a unit has few elements for each of N slices.

Time, for weak and for strong scaling: the planner's model (`projection.py`), beside what others have published.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

import onecopy
import overhead
from harness.fake import fake_group
from onecopy.planner.formulas.memory import model_state_bytes
from onecopy.planner.formulas.traffic import step_elements
from publish import projection
from publish.charts import Chart, Dot, Section, Table, page
from publish.projection import Projected, Published
from trained.cases import CASES, count

STAGES: Final = (0, 1, 2, 3)
_MIB: Final = 2**20
_BF16: Final = 2


@dataclass(frozen=True)
class Point:
    """One stage at one N, in bytes of one rank.

    Attributes:
        held: model states when the optimizer is about to step.
        peak: the meter's highest sum in a step; without activations.
        sent: of model states in a step.
        padded: elements of a gather of the whole model, over its parameters.
        overhead: microseconds of the engine per unit and step, with narrow layers.
    """

    stage: int
    ranks: int
    held: int
    peak: int
    sent: int
    padded: float
    overhead: float


def measure(name: str, stage: int, ranks: int, layers: int, rounds: int) -> Point:
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    with fake_group(ranks):
        model = onecopy.shard(case.build(), stage, precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        meter, ledger = onecopy.meter(model), onecopy.ledger(model)
        held = 0
        for _ in range(2):
            meter.reset_peaks()
            # Few tokens, for CPUs that are slow in bf16; bytes of model states do not depend on them.
            model(*case.draw(generator, 1, 4)).backward()
            held = meter.total - meter.live["communication"]
            optimizer.step()
            optimizer.zero_grad()
        last = ledger.last_step
        assert last is not None
        found = (held, sum(meter.peak.values()), last.state_bytes, onecopy.padded_numel(model) / count(case)[0])
    del model, optimizer
    gc.collect()
    own = overhead.measure(overhead.Case("linear", layers, ranks, stage), rounds).engine() if layers else 0.0
    return Point(stage, ranks, *found, overhead=own)


# --- the page


def byte_charts(points: Sequence[Point], parameters: int) -> list[Chart]:
    """The paper's curves and the engine's dots; and its overhead, if that was taken."""
    sizes = sorted({point.ranks for point in points})

    def curves(formula: Callable[[int, int], float]) -> dict[str, list[Dot]]:
        return {_name(stage): [Dot(n, formula(stage, n)) for n in sizes] for stage in STAGES}

    def dots(value: Callable[[Point], float]) -> dict[str, list[Dot]]:
        return {_name(stage): [Dot(p.ranks, value(p)) for p in points if p.stage == stage] for stage in STAGES}

    states = curves(lambda stage, n: model_state_bytes(stage, parameters, n).total / _MIB)
    sent = curves(lambda stage, n: step_elements(stage, parameters, n).total * _BF16 / _MIB)
    found = [
        Chart("Model states held at the optimizer's step", "MiB", states, dots(lambda p: p.held / _MIB), True),
        Chart("Peak of the meter in a step", "MiB", states, dots(lambda p: p.peak / _MIB), True),
        Chart("Sent in a step", "MiB", sent, dots(lambda p: p.sent / _MIB)),
    ]
    if any(point.overhead for point in points):
        target = {"target": [Dot(n, overhead.TARGET) for n in sizes]}
        found.append(Chart("Engine per unit and step", "µs", target, dots(lambda p: p.overhead)))
    return found


def _name(stage: int) -> str:
    return f"stage {stage}"


def time_charts(points: Sequence[Projected], others: Sequence[Published]) -> list[Chart]:
    """Speed and efficiency of one model under one kind of scaling; of others, the speed."""
    speed, efficiency = {}, {}
    for way in projection.WAYS:
        own = [point for point in points if point.way == way]
        speed[way] = [Dot(point.ranks, point.speed, point.fits) for point in own]
        efficiency[way] = [Dot(point.ranks, 100 * point.efficiency, point.fits) for point in own]
    dots: dict[str, list[Dot]] = {}
    for one in others:
        if one.model == points[0].model:
            dots.setdefault(f"{one.way}: {one.source}", []).append(Dot(one.ranks, one.speed))
    return [
        Chart("Tokens a second and GPU", "tokens/s", speed, dots),
        Chart("Efficiency, of the same on one node", "%", efficiency),
    ]


def time_sections(points: Sequence[Projected], others: Sequence[Published]) -> list[Section]:
    """For each model and kind of scaling its charts and numbers; then published runs and assumptions."""
    sections = []
    for study in projection.STUDIES:
        for scaling in ("weak", "strong"):
            chosen = [point for point in points if (point.model, point.scaling) == (study.name, scaling)]
            if not chosen:
                continue
            work = (
                f"every rank has {study.samples} samples a step, in one micro-batch"
                if scaling == "weak"
                else f"{study.batch:,} samples a step, shared by the ranks in micro-batches of {study.samples} at most"
            )
            measured = any(one.model == study.name for one in others)
            words = f"{study.source}; {study.shape.parameters / 1e9:.2f} G parameters, bf16; {work}. " + (
                "Dots: measured on H100 by the playbook's authors with nanotron, which sends after backward and hides "
                "next to nothing; lines: the planner for onecopy, which lets half of computing hide messages."
                if measured
                else "Dashed: does not fit 80 GB. No run of these is known: lines only."
            )
            sections.append(
                Section(
                    f"{scaling.capitalize()} scaling, {study.name}, by the planner's time model",
                    words,
                    time_charts(chosen, others),
                    list(projection.WAYS),
                    [numbers(chosen)],
                )
            )
    rows = [
        (one.model, one.way, str(one.ranks), f"{one.speed:,.0f}", f"{one.projected:,.0f}", one.source) for one in others
    ]
    head = ("model", "way", "N", "published, tokens/s/GPU", "planner", "source")
    sections.append(Section("Published runs beside the planner", "", tables=[Table("", head, rows)]))
    known = [Table("", ("what", "value", "source"), projection.assumptions())]
    words = "Lines are a model, fitted on another engine. No GPU has run onecopy on more than one node."
    sections.append(Section("What the time model assumes", words, tables=known))
    return sections


def numbers(points: Sequence[Projected]) -> Table:
    """Tokens a second and GPU, and the efficiency, of one model under one kind of scaling."""
    sizes = sorted({point.ranks for point in points})
    cells = {
        (p.way, p.ranks): f"{p.speed:,.0f} ({p.efficiency:.0%}{'' if p.fits else ', does not fit'})" for p in points
    }
    rows = [[str(n), *(cells.get((way, n), "") for way in projection.WAYS)] for n in sizes]
    return Table("Tokens a second and GPU (efficiency)", ["N", *projection.WAYS], rows)


def whole_page(
    points: Sequence[Point], parameters: int, name: str, projected: Sequence[Projected], others: Sequence[Published]
) -> str:
    """All sections."""
    words = (
        f"{name}, {parameters:,} parameters, bf16 with fp32 masters and AdamW (K = 12), one micro-batch. Lines: ZeRO "
        f"§5 and §7. Dots: the engine on torch's fake process group, rank 0, by its own meter and ledger."
    )
    first = Section(
        "Bytes and overhead of a rank", words, byte_charts(points, parameters), [*map(_name, STAGES), "target"]
    )
    headline = "Bytes and overhead from the engine on ranks that do not exist; time from a model. No time was measured."
    return page("Scaling, on paper and by simulation", headline, [first, *time_sections(projected, others)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="gpt-3m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 1024, 4096])
    parser.add_argument("--layers", type=int, default=20, help="of the net for overhead; 0 leaves overhead out")
    parser.add_argument("--rounds", type=int, default=5, help="steps of it")
    parser.add_argument("--json", type=Path, help="file for everything found")
    parser.add_argument("--html", type=Path, help="file for the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parameters = count(CASES[options.case])[0]
    points = [
        measure(options.case, stage, ranks, options.layers, options.rounds)
        for ranks in options.ranks
        for stage in STAGES
    ]
    projected, others = projection.everything(), projection.published()
    print(bytes_table(points, parameters))
    print(times_table(projected))
    for what, value, source in projection.assumptions():
        print(f"- {what}: {value} ({source})" if value else f"- {what}")
    if options.json:
        content = {
            "case": options.case,
            "parameters": parameters,
            "points": [asdict(point) for point in points],
            "projected": [asdict(point) for point in projected],
            "published": [asdict(one) for one in others],
            "assumptions": projection.assumptions(),
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.html:
        options.html.write_text(whole_page(points, parameters, options.case, projected, others))


def bytes_table(points: Sequence[Point], parameters: int) -> str:
    """Each point beside its formulas, as lines of a table."""
    lines = ["| N | stage | held MiB | / formula | peak MiB | sent MiB | / formula | padded | µs per unit |"]
    lines.append("|---" * 9 + "|")
    for p in points:
        states = model_state_bytes(p.stage, parameters, p.ranks).total
        paper = step_elements(p.stage, parameters, p.ranks).total * _BF16
        lines.append(
            f"| {p.ranks} | {p.stage} | {p.held / _MIB:.2f} | {p.held / states:.3f} | {p.peak / _MIB:.2f} "
            f"| {p.sent / _MIB:.2f} | {p.sent / paper:.3f} | {p.padded:.3f} | {p.overhead:.0f} |"
        )
    return "\n".join(lines) + "\n"


def times_table(projected: Sequence[Projected]) -> str:
    """Tokens a second and GPU at some sizes; * does not fit."""
    sizes = (8, 64, 512, 4096)
    lines = ["| model | scaling | way | " + " | ".join(f"N = {n}" for n in sizes) + " |", "|---" * 7 + "|"]
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for p in projected:
        cell = f"{p.speed:,.0f} ({p.efficiency:.0%}){'' if p.fits else ' *'}"
        rows.setdefault((p.model, p.scaling, p.way), {})[p.ranks] = cell
    lines += [f"| {' | '.join(key)} | {' | '.join(row.get(n, '') for n in sizes)} |" for key, row in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
