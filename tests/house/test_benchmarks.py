"""What benchmarks say about what they measured. Oracles: hand-made measurements; ZeRO's formulas; torch alone.

Nothing here is timed: `python benchmarks/compare.py --fast` is a report.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markupsafe import escape

import compare
import ledger_cost
import memory
import muon
import offload
import overhead
import retake
import scaling
import tables
from harness import forks, systems
from harness.contest import Contest, Timed, hold
from harness.weighing import Weighed, account
from harness.work import Work
from onecopy.observe.categories import CATEGORIES
from onecopy.planner.formulas.calibrated import CROWDING, GROWTH, HIDDEN_SHARE, LATENCY, LINK_EFFICIENCY, UTILISATION
from publish import charts, projection
from ranks import run_ranks
from trained.cases import CASES, count
from trained.gpt import Shape

WORK = Work("gpt-3m", "fp32", micro_batches=2, ranks=2, samples=1, size=8, steps=2, warmup=1)


def _contest() -> Contest:
    """DDP took 1, 2 and 4 s; onecopy's stage 1 half of it each time; stage 2 as much, but its losses went astray."""
    timed = {
        "DDP": Timed([1.0, 2.0, 4.0], [0.1] * 3, [5.0] * 3, 0.0),
        "onecopy stage 1": Timed([0.5, 1.0, 2.0], [0.1] * 3, [5.0] * 3, 1e-6),
        "onecopy stage 2": Timed([0.5, 1.0, 2.0], [0.1] * 3, [5.0] * 3, 0.5),
    }
    weighed = {
        "onecopy stage 1": Weighed(80 * 2**20, None, None, None, 1.0),
        "DDP + ZeroRedundancyOptimizer": Weighed(100 * 2**20, None, None, None, 1.0),
    }
    return Contest(WORK, 10, 10, timed, weighed, {"DeepSpeed stage 1": "deepspeed is not installed"})


_HOLD = """
import pickle, sys
from harness import systems
from harness.contest import hold
work, names = pickle.load(sys.stdin.buffer)
contest = hold(work, {name: systems.SYSTEMS[name] for name in names}, weigh=True, network=False, limit=60.0)
pickle.dump(contest, sys.stdout.buffer)
"""


def _hold_in_a_fresh_process(work: Work, names: list[str]) -> Contest:
    """A contest whose ranks are not forked from pytest: they would find memory that earlier tests have freed."""
    environment = os.environ | {"PYTHONPATH": str(Path(compare.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", _HOLD],
        input=pickle.dumps((work, names)),
        capture_output=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    contest = pickle.loads(done.stdout)
    assert isinstance(contest, Contest)
    return contest


def test_ratios_are_taken_step_by_step_and_held_against_the_target() -> None:
    assert _contest().ratio("onecopy stage 1", "DDP") == (0.5, 0.5, 0.5)
    text = compare.report(_contest())
    assert "| onecopy stage 1 | DDP | time ≤ 0.95 | 0.50 (0.50 – 0.50) |  | met |" in text
    assert "| onecopy stage 1 | DDP + ZeroRedundancyOptimizer | RSS ≤ 1.00 | 0.80 | | met |" in text


def test_a_time_with_other_losses_is_not_counted_and_is_named() -> None:
    text = compare.report(_contest())
    assert "not counted: onecopy stage 2, whose losses differ by 5.0e-01 (allowed: 1e-03)" in text
    assert "onecopy stage 2 | DDP |" not in text


def test_what_was_left_out_is_named_with_its_reason() -> None:
    assert "left out: DeepSpeed stage 1: deepspeed is not installed" in compare.report(_contest())


def test_every_target_names_systems_that_exist() -> None:
    assert {name for target in compare.TARGETS for name in (target.system, target.peer)} <= set(systems.SYSTEMS)


def test_cases_have_the_sizes_that_their_papers_give() -> None:
    """ResNet-50: 25.557 M (torchvision's count of the same table). LoRA: 2 layers x rank 8 x (in + out) in 8 blocks."""
    assert count(CASES["resnet50"]) == (25_557_032, 25_557_032)
    assert count(CASES["lora"])[1] == 8 * 8 * ((512 + 1536) + (512 + 512))
    everything, _ = count(CASES["llama"])
    vocabulary = 65536 * 256
    assert everything - vocabulary == pytest.approx(4e6, rel=0.02)


def test_a_contest_of_two_ranks_finds_equal_losses_and_the_meters_states() -> None:
    """Oracle: DDP's losses; for memory 4 + 4 + 8 bytes of Ψ/2 (stage 3, fp32) as the least there can be.

    The floor comes first and is nobody's yardstick: it has the others' loss until its first update, and no memory.
    """
    contest = _hold_in_a_fresh_process(WORK, [systems.FLOOR, "DDP", "onecopy stage 3"])
    assert contest.left_out == {}
    assert set(contest.timed) == set(contest.agreeing) == set(contest.weighed) == {"DDP", "onecopy stage 3"}
    assert contest.floor is not None
    assert contest.floor.losses[0] == pytest.approx(contest.timed["DDP"].losses[0], rel=1e-6)
    assert contest.floor.deviation > WORK.tolerance
    assert len(contest.floor.seconds) == WORK.steps
    ours, ddp = (contest.timed[name] for name in ("onecopy stage 3", "DDP"))
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert len(ours.seconds) == WORK.steps
    parameters, _ = count(CASES["gpt-3m"])
    weighed = contest.weighed["onecopy stage 3"]
    assert weighed.meter is not None
    assert 12 * parameters / 2 <= sum(weighed.meter.values()) < 16 * parameters
    assert weighed.formula == 16 * parameters / 2
    # 3gΨ(N-1)/N elements of 4 bytes, ZeRO §7.
    assert weighed.paper == 3 * 2 * parameters / 2 * 4
    assert contest.weighed["DDP"].resident > weighed.resident


def test_a_peak_is_held_against_formula_activations_and_named_buffers() -> None:
    """By hand, in MiB: stage 3 found 110 of 100 + 4 + (2 + 3 + 1); stage 2 has no window, its slices stand apart.

    At stage 0 the formula has 100 / 4 of gradients, the peak has 1 + 26.
    """
    mib = 2**20
    meter = dict.fromkeys(CATEGORIES, 0) | {
        "parameters_sliced": 50 * mib,
        "parameters_gathered": 3 * mib,
        "gradients_whole": 1 * mib,
        "activations": 4 * mib,
        "communication": 2 * mib,
    }
    weighed = Weighed(130 * mib, meter, 100.0 * mib, None, 1.0, own=20 * mib)
    third, second, first = (account(weighed, stage, "fp32") for stage in (3, 2, 1))
    assert None not in (third, second, first)
    assert third.ratio == 1.0
    assert third.slices == 0
    assert second.ratio == pytest.approx(110 / 107)
    assert second.slices == 50 * mib
    assert first.ratio == pytest.approx(110 / 106)
    none = account(replace(weighed, meter=meter | {"gradients_sliced": 26 * mib}), 0, "fp32")
    assert none is not None
    assert none.ratio == pytest.approx(110 / (100 + 4 + 2 + 2))
    assert account(Weighed(1, None, 1.0, None, 1.0), 3, "fp32") is None
    contest = Contest(WORK, 10, 10, {}, {"onecopy stage 3": weighed})
    row = "| 110.0 | 100.0 | 4.0 | communication 2.0, gathered 3.0, gradients under way 1.0 | 1.000 | met | 0.0 |"
    assert row in compare.report(contest)


def test_torchs_own_count_of_tensors_is_the_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank at stage 3 in bf16. Oracles: torch's CPU allocator; 16Ψ bytes of states (ZeRO §5)."""
    monkeypatch.setitem(memory.SHAPES, "30m", Shape(layers=2, hidden=128, heads=2, vocabulary=512))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in memory.build(memory.SHAPES["30m"], tied=False).parameters())
    [[line]] = forks.run_ranks(1, memory.measure, memory.Case(stage=3, precision="bf16", tokens=4), limit=60.0)
    found = json.loads(line)
    assert found["metered"] == pytest.approx(found["allocated"], rel=0.005)
    assert sum(found["held"].values()) == pytest.approx(16 * parameters, rel=0.01)


def test_a_system_that_fails_alone_is_left_out_by_name() -> None:
    def fail(model: torch.nn.Module, settings: systems.Settings) -> systems.Trainer:
        raise RuntimeError("it does not run here")

    chosen = {"DDP": systems.SYSTEMS["DDP"], "broken": systems.System(0, fail)}
    contest = hold(WORK, chosen, weigh=True, network=False, limit=60.0)
    assert contest.left_out == {"broken": "RuntimeError: it does not run here"}
    assert list(contest.timed) == ["DDP"]


def _on_fake_groups(rank: int) -> tuple[list[str], scaling.Point, float]:
    measured = overhead.measure(overhead.Case("linear", layers=4, ranks=8, stage=3), rounds=2)
    overhead.measure(overhead.Case("linear", layers=4, ranks=8, stage=3), rounds=2, group="silent")
    point = scaling.measure("gpt-3m", stage=3, ranks=8, layers=0, rounds=0)
    cost = ledger_cost.seconds_of_a_booking([ledger_cost.Entry("all_gather", "forward", "", "shard", 1, 8, 0, 0)], 10)
    return list(measured.collectives), point, cost


def test_on_the_fake_group_phases_are_told_apart_and_bytes_are_the_papers() -> None:
    """Oracle: ZeRO §5 and §7 for stage 3 on 8 ranks in bf16: 16Ψ/N bytes held, 3Ψ(N-1)/N elements sent."""
    [(phases, point, cost)] = run_ranks(1, _on_fake_groups, group=False)
    assert phases == ["forward", "backward", "step"]
    parameters, _ = count(CASES["gpt-3m"])
    assert point.held == pytest.approx(16 * parameters / 8, rel=0.01)
    assert point.sent == pytest.approx(3 * parameters * 7 / 8 * 2, rel=0.01)
    assert cost > 0


def test_strong_scaling_is_the_ring_model_by_hand() -> None:
    """7.5B at stage 3 on 512 H100, 4 samples of 2,048 tokens each. Oracle: the ring and 6Ψ a token, written out."""
    hidden, layers, ranks, tokens = 4096, 36, 512, 4 * 2048
    block, root = 12 * hidden**2 + 13 * hidden, 51_200 * hidden + 2 * hidden
    parameters = layers * block + root
    operations = (6 * parameters + 12 * layers * hidden * 2048) * tokens
    # Forward, and backward twice, read or write each weight of 2 bytes.
    compute = operations / (989e12 * UTILISATION * 2**GROWTH) + 3 * 2 * parameters / 3.35e12
    # 64 nodes of 8 cards of 50 GB/s: six doublings.
    bandwidth = 8 * 50e9 * LINK_EFFICIENCY / (1 + 6 * CROWDING)
    padded = [math.ceil(numel / 4096) * 4096 for numel in (root, *[block] * layers)]
    gather = sum(511 * (LATENCY + 2 * numel / 512 / bandwidth) for numel in padded)
    exposed = (gather - HIDDEN_SHARE * compute / 3) + (2 * gather - HIDDEN_SHARE * compute * 2 / 3)
    update = sum(padded) / 512 * 28 / 3.35e12
    [point] = [p for p in projection.project(projection.STUDIES[1], "strong") if (p.way, p.ranks) == ("stage 3", ranks)]
    assert (point.micro_batch, point.micro_batches) == (4, 1)
    assert point.exposed == pytest.approx(exposed, rel=1e-6)
    assert point.speed == pytest.approx(tokens / (compute + exposed + update), rel=1e-6)


def test_projections_keep_what_scaling_means() -> None:
    """Weak: equal work for every rank. Strong: equal work for all ranks together, to the last size that divides it."""
    for study in projection.STUDIES:
        weak, strong = projection.project(study, "weak"), projection.project(study, "strong")
        assert {point.micro_batch * point.micro_batches for point in weak} == {study.samples}
        assert {point.micro_batch * point.micro_batches * point.ranks for point in strong} == {study.batch}
        assert max(point.ranks for point in strong) == min(4096, study.batch)
        assert all(point.efficiency == 1 for point in weak + strong if point.ranks == 8)


def test_published_runs_are_those_of_their_sources() -> None:
    """The playbook's 1B on 8 to 256 H100 at stages 0 and 1; 5.33 and 4.95 samples/s of LLaMA-7B on 8 A800."""
    found = {(one.model, one.way, one.ranks): one.speed for one in projection.published()}
    sizes = (8, 16, 32, 64, 128, 256)
    assert {key[1:] for key in found if key[0] == "1.3B"} == {(f"stage {s}", n) for s in (0, 1) for n in sizes}
    assert found["1.3B", "stage 0", 256] == 15_700
    assert found["1.3B", "stage 1", 256] == 11_327
    assert found["LLaMA-7B, 8 A800", "stage 3", 8] == 4.95 * 4096 / 8


def _page() -> str:
    points = [scaling.Point(s, n, 10**6, 10**6, 10**6, 1.0, 100.0) for s in scaling.STAGES for n in (8, 64)]
    return scaling.whole_page(points, 10**6, "a model", projection.everything(), projection.published())


def test_the_scaling_page_needs_nothing_from_outside_and_shows_every_point() -> None:
    points = [scaling.Point(s, n, 10**6, 10**6, 10**6, 1.0, 100.0) for s in scaling.STAGES for n in (8, 64)]
    text = _page()
    assert "http:" not in text
    assert "https:" not in text
    assert "src=" not in text
    drawn = [ElementTree.fromstring(charts.svg(chart)) for chart in scaling.byte_charts(points, 10**6)]
    assert [len(chart.findall("circle")) for chart in drawn] == [len(points)] * 4
    for what, value, source in projection.assumptions():
        assert str(escape(what)) in text
        assert str(escape(value)) in text
        assert str(escape(source)) in text
    # 1.5B and 7.5B weak and strong, 1.3B strong, two charts each.
    assert text.count("<svg") == 4 + 5 * 2
    # The playbook's 12 runs with data parallelism alone are dots.
    assert text.count("nanotron, N = ") == 12


def test_curves_that_stop_fitting_are_dashed_from_there() -> None:
    curve = [charts.Dot(1, 1, False), charts.Dot(2, 1, False), charts.Dot(4, 1), charts.Dot(8, 1)]
    drawn = ElementTree.fromstring(charts.svg(charts.Chart("a", "b", {"stage 1": curve})))
    lines = [(line.get("class"), len((line.get("points") or "").split())) for line in drawn.findall("polyline")]
    assert lines == [("line impossible s-stage-1", 3), ("line s-stage-1", 2)]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_scaling_page_is_drawn_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    path = tmp_path / "scaling.html"
    path.write_text(_page())
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        troubles: list[str] = []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = [chart.bounding_box() for chart in page.locator("main svg").all()]
        assert all(size["width"] > 250 and size["height"] > 150 for size in sizes)
        strokes = page.eval_on_selector_all("polyline", "lines => lines.map(line => getComputedStyle(line).stroke)")
        assert "none" not in strokes
        browser.close()
    assert troubles == []


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_in_the_docs_are_those_of_the_results(page: Path) -> None:
    """Oracle: benchmarks/results. If this fails, `python benchmarks/tables.py` writes them."""
    text = page.read_text()
    assert "<!-- results: " in text
    assert tables.rendered(text) == text


def test_a_block_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(KeyError, match="tmies"):
        tables.rendered("<!-- results: tmies -->\n<!-- end -->")


def test_the_driver_takes_every_file_of_results_that_the_docs_show() -> None:
    """And each of its commands is understood by its script."""
    assert len({step.name for step in retake.STEPS}) == len(retake.STEPS)
    for step in retake.STEPS:
        script, *options = shlex.split(step.line)
        assert (retake.HERE / script).exists()
        if script == "compare.py":
            asked = compare.parse(options)
            assert systems.FLOOR in (asked.only or systems.SYSTEMS)
            assert len(asked.case) == len(asked.ranks) == len(asked.precision) == len(asked.micro_batches) == 1
            assert set(asked.only or ()) <= set(systems.SYSTEMS)


def test_a_step_that_fails_or_hangs_is_named_and_ends(tmp_path: Path) -> None:
    failing = retake.Step("broken", "times", "retake.py --only nothing", limit=60.0)
    assert "FAILED with 2" in retake.take(failing, tmp_path)
    assert "invalid choice" in (tmp_path / "broken.txt").read_text()
    assert "STOPPED" in retake.take(retake.Step("slow", "times", "scaling.py", limit=0.2), tmp_path)


def test_the_offload_benchmark_moves_the_bytes_of_adam(tmp_path: Path) -> None:
    """16 bytes a parameter are read and 12 written (ZeRO-Infinity's states with AdamW); nothing is left."""

    def run(_: int) -> dict[str, float]:
        return offload.compare(tmp_path, layers=4, optimizer="adamw-fused", rounds=2, per_unit=1)

    (found,) = run_ranks(1, run, group=False)
    parameters = 4 * offload.WIDTH**2
    assert (found["read bytes"], found["written bytes"]) == (16 * parameters, 12 * parameters)
    assert found["pool bytes"] <= 3 * 16 * offload.WIDTH**2
    assert found["throughput"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_peers_muon_is_torchs() -> None:
    """What fully_shard's entrant does to a gathered update. Oracle: torch.optim.Muon's first step without momentum."""
    for shape in ((24, 8), (8, 24), (16, 16)):
        matrix = torch.nn.Parameter(torch.zeros(shape))
        matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0).step()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        torch.testing.assert_close(matrix.detach(), -scale * muon.newton_schulz(matrix.grad).float(), atol=2e-2, rtol=0)
    assert set(muon.PEERS) < set(muon.SYSTEMS)
    assert muon.ADAMW in muon.SYSTEMS
