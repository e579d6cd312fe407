"""Write the docs' tables from `results/`, so that the two cannot disagree. Nothing is measured here.

    python benchmarks/tables.py
    python benchmarks/tables.py --check

What stands between `<!-- results: NAME -->` and `<!-- end -->` in a page is made by the function of that name below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import compare
import ledger_cost
import memory
import overhead
import wire
from harness.contest import Contest, Timed
from harness.systems import FLOOR, SYSTEMS
from harness.weighing import EXPLAINED, Weighed, account
from harness.work import Work
from retake import HERE, RESULTS, STEPS

PAGES: Final = tuple(HERE.parent / "docs" / name for name in ("performance.md", "memory.md", "traffic.md"))

_BLOCK: Final = re.compile(r"(<!-- results: ([a-z0-9_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_STAGES: Final = range(4)


def rendered(text: str) -> str:
    """A page with its tables as results have them.

    Raises:
        KeyError: for the name of a block that nothing makes.
    """

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        made = MADE[name](*arguments).strip("\n")
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return _BLOCK.sub(fill, text)


# --- what was found


def contests() -> dict[str, Contest]:
    """Of each comparison that has results, in the order in which they are taken."""
    found = {}
    for step in STEPS:
        if step.name.startswith("compare_") and (RESULTS / f"{step.name}.json").exists():
            [one] = _read(step.name)["contests"]
            found[step.name] = Contest(
                Work(**one["work"]),
                one["parameters"],
                one["trainable"],
                {name: Timed(**timed) for name, timed in one["timed"].items()},
                {name: Weighed(**weighed) for name, weighed in one["weighed"].items()},
                one["left_out"],
                Timed(**one["floor"]) if one.get("floor") else None,
            )
    return found


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _engine() -> list[overhead.Measured]:
    fields = ("plain", "sharded", "collectives")
    return [
        overhead.Measured(overhead.Case(**one["case"]), *(one[field] for field in fields))
        for one in _read("overhead")["measured"]
    ]


def _ledger() -> list[ledger_cost.Cost]:
    return [ledger_cost.Cost(**one) for one in _read("ledger_cost")]


def _wired(name: str = "wire") -> list[wire.Measured]:
    return [wire.Measured(**one) for one in _read(name)["measured"]]


# --- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


_KEPT: Final = "\0"
"""In place of a blank at which no line may end."""


def _command(name: str) -> str:
    [step] = [step for step in STEPS if step.name == name]
    # A shell would take a line that ends within quotes as it stands.
    kept = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace(" ", _KEPT), step.command)
    lines = [
        line.replace(_KEPT, " ") for line in textwrap.wrap(kept, 112, break_long_words=False, break_on_hyphens=False)
    ]
    return "    " + " \\\n        ".join(lines)


def times() -> str:
    """All comparisons beside all targets of step time: median ratios, bold where missed; a floor above the target."""
    head = ["case", *(f"{_plain(t.system)} / {_plain(t.peer)} ≤ {t.ratio:.2f}" for t in compare.TARGETS)]
    timed = [one for one in contests().values() if one.timed]
    return table(head, ([_short(one.work), *(_cell(one, target) for target in compare.TARGETS)] for one in timed))


def _plain(system: str) -> str:
    """A system's name for the head of a narrow column."""
    return system.removeprefix("onecopy ").removeprefix("DDP + ").removesuffix(", reshard_after_forward=True")


def _cell(one: Contest, target: compare.Target) -> str:
    if not {target.system, target.peer} <= set(one.agreeing):
        return ""
    ratio = one.ratio(target.system, target.peer)[0]
    if compare.met(ratio, target.ratio):
        return f"{ratio:.2f}"
    floor = compare.unreachable(one, target)
    return f"**{ratio:.2f}**" + ("" if floor is None else f" (floor {floor:.2f})")


def _short(work: Work) -> str:
    parts = [work.case, f"N={work.ranks}"]
    parts += [f"g={work.micro_batches}"] if work.micro_batches > 1 else []
    return " ".join(parts + ([work.precision] if work.precision != "fp32" else []))


def targets() -> str:
    """All other targets, each with the worst that was found."""
    rows = [*_memory_targets(), *_traffic_targets()]
    engine = _engine()
    worst = max(engine, key=lambda one: one.engine())
    flat = _growth(engine, lambda case: case.ranks, lambda case: (case.stage, case.layers))
    linear = _growth(engine, lambda case: case.layers, lambda case: (case.stage, case.ranks))
    where = f"stage {worst.case.stage}, N = {worst.case.ranks}"
    rows.append(("engine, µs per unit and step", 150, worst.engine(), f"{worst.engine():.0f} ({where})"))
    rows.append(("the same at the largest N over the smallest", 1.1, round(flat, 2), f"{flat:.2f}"))
    rows.append(("the same with the most units over the fewest", 1.1, round(linear, 2), f"{linear:.2f}"))
    share = max(cost.counted for cost in _ledger())
    rows.append(("ledger's share of a step", 0.01, share, f"{share:.2%}"))
    return table(
        ["what", "at most", "found, the worst", ""],
        [[what, f"{bar:.4g}", words, "met" if value <= bar else "missed"] for what, bar, value, words in rows],
    )


def _growth(
    found: Sequence[overhead.Measured],
    size: Callable[[overhead.Case], int],
    fixed: Callable[[overhead.Case], tuple[int, int]],
) -> float:
    """The engine's time where ``size`` is largest over where it is smallest, all else ``fixed``; the worst of all."""
    groups: dict[tuple[int, int], list[overhead.Measured]] = {}
    for one in found:
        groups.setdefault(fixed(one.case), []).append(one)
    ends = [sorted(group, key=lambda one: size(one.case)) for group in groups.values() if len(group) > 1]
    return max(group[-1].engine() / group[0].engine() for group in ends)


def _memory_targets() -> list[tuple[str, float, float, str]]:
    rows = []
    [weighed] = [one for name, one in contests().items() if name.endswith("_memory")]
    for stage in _STAGES:
        own = weighed.weighed.get(f"onecopy stage {stage}")
        if own is None:
            continue
        peers = {
            name: own.resident / peer.resident
            for name, peer in weighed.weighed.items()
            if SYSTEMS[name].stage == stage and not SYSTEMS[name].ours
        }
        if peers:
            closest = max(peers, key=lambda name: peers[name])
            words = f"{peers[closest]:.2f} ({closest})"
            rows.append((f"peak memory, stage {stage} / any peer of that stage", 1.0, round(peers[closest], 2), words))
        explained = account(own, stage, weighed.work.precision)
        if explained is not None:
            words = f"{explained.ratio:.3f}"
            what = f"peak memory, stage {stage} / formula + activations + named buffers"
            rows.append((what, EXPLAINED, round(explained.ratio, 3), words))
    own_head = [one for one in _read("memory") if not one["tied"]]
    least = min(own_head, key=lambda one: sum(one["peak"].values()) / one["resident"])
    ratio = least["resident"] / sum(least["peak"].values())
    words = f"{ratio:.3f} (stage {least['stage']}, N = {least['ranks']})"
    bar = round(1 / memory.EXPLAINED, 3)
    rows.append(("resident peak / sum of the meter's categories, bf16", bar, round(ratio, 3), words))
    return rows


def _traffic_targets() -> list[tuple[str, float, float, str]]:
    ours = [one for one in _wired() if SYSTEMS[one.system].ours]
    worst = max(ours, key=lambda one: max(one.sent) / one.paper)
    ratio = max(worst.sent) / worst.paper
    words = f"{ratio:.3f} ({worst.system}, N = {worst.ranks}, g = {worst.micro_batches}, {worst.precision})"
    return [("bytes sent / ZeRO §7, by the kernel, any rank", 1.02, ratio, words)]


def cases() -> str:
    """For each comparison its command, what every system took, and the floor."""
    parts = []
    for name, one in contests().items():
        if not one.timed:
            continue
        rows = []
        for system in SYSTEMS:
            if system in one.agreeing:
                timed = one.timed[system]
                rows.append([system, *compare.time_cells(timed, one.ratio(system, "DDP"))])
        below = []
        if one.floor is not None:
            seconds, ratio, optimizer = compare.time_cells(one.floor, one.floor_ratio("DDP"))
            below = [f"The floor, {FLOOR}: {seconds} s, {ratio} of DDP, the optimizer {optimizer} s."]
        below += [
            *(
                f"Not counted: {s}, whose losses differ by {t.deviation:.0e}."
                for s, t in one.timed.items()
                if s not in one.agreeing
            ),
            *(f"Left out: {s}: {reason}." for s, reason in one.left_out.items()),
        ]
        parts += [
            f"### {one.work}",
            f"{one.parameters / 1e6:.1f} M parameters, {len(timed.seconds)} steps of each system.",
        ]
        parts += [_command(name), table(["system", "step s", "/ DDP (quartiles)", "optimizer s"], rows), *below]
    return "\n\n".join(parts)


def weights() -> str:
    """Memory and traffic of every system, and onecopy's peaks explained."""
    [(name, one)] = [(name, one) for name, one in contests().items() if name.endswith("_memory")]
    head = ("system", "RSS", "meter", "states by formula", "sent in a step", "paper")
    rows = []
    for system, weighed in one.weighed.items():
        meter = None if weighed.meter is None else sum(weighed.meter.values())
        sizes = (weighed.resident, meter, weighed.formula, weighed.sent, weighed.paper)
        rows.append([system, *("" if size is None else f"{size / 2**20:.1f}" for size in sizes)])
    parts = [_command(name).replace("    python", "    sudo python"), "MiB of one rank:", table(head, rows)]
    explained = compare.account_table(one)
    if explained.count("\n") > 1:
        parts += ["onecopy's peaks explained, MiB:", explained]
    return "\n\n".join(parts)


def states() -> str:
    """The meter beside formulas, torch's count and the resident set."""
    return f"{_command('memory')}\n\n{memory.table(_read('memory'))}"


def engine() -> str:
    """The engine's own time."""
    found = _engine()
    layers = sorted({one.case.layers for one in found})
    ranks = min(one.case.ranks for one in found)
    middle = layers[len(layers) // 2]
    by_ranks = overhead.table([one for one in found if one.case.layers == middle], "ranks")
    by_layers = overhead.table([one for one in found if one.case.ranks == ranks], "layers")
    return f"{_command('overhead')}\n\n{by_ranks}\n\n{by_layers}"


def ledger() -> str:
    """The ledger's cost."""
    head = ("model", "stage", "bookings a step", "µs each", "share of the step", "step with / without (quartiles)")
    rows = []
    for cost in _ledger():
        middle, low, high = cost.witnessed
        cells = [cost.model, f"{cost.stage}", f"{cost.bookings}", f"{1e6 * cost.booking:.2f}", f"{cost.counted:.2%}"]
        rows.append([*cells, f"{middle:.3f} ({low:.3f} – {high:.3f})"])
    return f"{_command('ledger_cost')}\n\n{table(head, rows)}"


def sent(precision: str) -> str:
    """What each system sends, by the kernel."""
    return wire.bytes_table(_wired(), precision)


def rates() -> str:
    """Seconds of a step on shaped links."""
    found = wire.seconds_table(_wired("wire_rates"), "fp32")
    return f"{_command('wire_rates').replace('    python', '    sudo python')}\n\n{found.replace(', N=2 g=1', '')}"


MADE: Final[dict[str, Callable[..., str]]] = {
    made.__name__: made for made in (times, targets, cases, weights, states, engine, ledger, sent, rates)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs from the results")
    options = parser.parse_args()
    differing = []
    for page in PAGES:
        text = page.read_text()
        made = rendered(text)
        if made != text:
            differing.append(page.name)
            if not options.check:
                page.write_text(made)
    print("written: " + (", ".join(differing) or "nothing") if not options.check else f"differing: {differing}")
    if options.check and differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
