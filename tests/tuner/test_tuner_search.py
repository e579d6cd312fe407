"""The search without processes. Oracles: closed forms, a machine whose constants are known, stored measurements."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tuning
from onecopy.errors import SettingsError
from onecopy.planner.machine.calibration import Calibration, read_calibration, write_calibration
from onecopy.tuner.belief import Belief, Expected, Point, below, distance, improvement
from onecopy.tuner.candidate import Candidate, needs_as_much
from onecopy.tuner.expectation import Expectation
from onecopy.tuner.outcome import Outcome
from onecopy.tuner.page import frontier
from onecopy.tuner.search import Search
from onecopy.tuner.space import Space, read_space, space_of
from onecopy.tuner.steps import settle
from onecopy.tuner.workload import OwnLoop
from tuned_loops import MACHINE, batches, build

SMALL = Space(micro_batch=(1, 2, 4, 8), prefetch=(1,))


@pytest.fixture(scope="module")
def expectation() -> Expectation:
    return Expectation(OwnLoop(build, batches), MACHINE)


def _measured(seconds: float, peak: int = 100_000_000) -> Outcome:
    return Outcome("measured", (2 * seconds, *[seconds] * 4), peak, base=50_000_000)


# --- steps


def test_warm_up_is_told_apart() -> None:
    timed = settle([9.0, 2.0, 1.0, 1.1, 0.9, 1.0])
    assert (timed.seconds, timed.warmup) == (1.0, 2)
    # Interquartile range of 0.9, 1.0, 1.0, 1.1: 0.05, by linear interpolation.
    assert timed.spread == pytest.approx(0.025, rel=0.01)


def test_two_steps_are_always_left() -> None:
    assert settle([5.0, 4.0, 1.0]).warmup == 1
    assert settle([5.0, 4.0]).seconds == 4.0


# --- space


def test_every_setting_keeps_the_global_batch() -> None:
    """Oracle: the count by hand: 4 divisors of 8, 2 kinds of checkpoints, 4 stages."""
    found = SMALL.candidates(2, 16)
    assert len(found) == len(set(found)) == 4 * 2 * 4
    assert {one.samples for one in found} == {16}


def test_what_makes_no_difference_is_one_setting() -> None:
    """Stage 0 gathers nothing ahead."""
    found = Space(micro_batch=(2,), checkpointing=("off",), prefetch=(1, 2)).candidates(2, 4)
    assert [one.stage for one in found] == [0, 1, 1, 2, 2, 3, 3]


def test_copies_and_tensor_ranks_divide_the_ranks() -> None:
    found = Space(replicate=(1, 2), tensor=(1, 2), micro_batch=(1,), checkpointing=("off", "P_a")).candidates(4, 8)
    assert {(one.stage > 0, one.replicate) for one in found} == {(False, 1), (True, 1), (True, 2)}
    assert {(one.tensor, one.checkpointing) for one in found} == {(1, "off"), (2, "off"), (2, "P_a")}
    assert {one.samples for one in found} == {8}


@pytest.mark.parametrize(
    "values, words",
    [
        ({"stages": [1]}, "unknown key 'stages' in x; did you mean 'stage'"),
        ({"stage": 1}, "stage in x must be a list"),
        ({"stage": [4]}, "stage"),
        ({"checkpointing": ["unit"]}, "did you mean 'units'"),
        ({"offload": ["optimizer on nvme"]}, "space.states"),
        ({"micro_batch": [0]}, "at least 1; found 0"),
    ],
)
def test_spaces_that_cannot_be(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        space_of(dict(values), "x")


def test_a_space_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text('stage = [2]\nmicro_batch = [1, 4]\nunits = ["auto", "one"]\n')
    assert read_space(tmp_path / "space.toml") == Space(stage=(2,), micro_batch=(1, 4), units=("auto", "one"))
    with pytest.raises(SettingsError, match="cannot be split over 2 ranks"):
        Space().candidates(2, 3)


# --- what needs more


@pytest.mark.parametrize(
    "this, other, phase, expected",
    [
        (Candidate(1, 8, 1, 2), Candidate(2, 8, 1, 2), "backward", True),
        (Candidate(2, 8, 1, 2), Candidate(1, 8, 1, 2), "backward", False),
        (Candidate(2, 8, 2, 2), Candidate(2, 4, 4, 2), "backward", True),
        # One micro-batch a step keeps no gradients of earlier ones.
        (Candidate(2, 8, 1, 2), Candidate(2, 4, 2, 2), "backward", False),
        (Candidate(2, 4, 2, 2), Candidate(2, 4, 2, 2, "units"), "forward", True),
        (Candidate(2, 4, 2, 2, "units"), Candidate(2, 4, 2, 2), "forward", False),
        (Candidate(2, 4, 2, 2, "selective"), Candidate(2, 4, 2, 2, "units"), "forward", True),
        (Candidate(2, 4, 2, 2, "selective"), Candidate(2, 4, 2, 2), "forward", False),
        (Candidate(2, 4, 2, 2, "units"), Candidate(2, 4, 2, 2, "selective"), "forward", False),
        # While the model is built, samples do not matter.
        (Candidate(1, 1, 8, 2, "units"), Candidate(2, 8, 1, 2), "load", True),
        (Candidate(1, 1, 8, 2, "units"), Candidate(2, 8, 1, 2), "step", False),
        (Candidate(3, 4, 2, 4), Candidate(3, 4, 2, 4, replicate=2), "forward", False),
        (Candidate(3, 4, 2, 4, replicate=2), Candidate(3, 4, 2, 4), "forward", True),
    ],
)
def test_which_setting_is_sure_to_need_as_much(this: Candidate, other: Candidate, phase: str, expected: bool) -> None:
    assert needs_as_much(this, other, phase) is expected


def test_what_needs_more_than_what_ran_out_is_not_tried(expectation: Expectation) -> None:
    candidates = SMALL.candidates(2, 16)
    search = Search(candidates, expectation, limit=1e8)
    failed = Candidate(1, 4, 2, 2)
    search.add(failed, Outcome("out of memory", peak=99_000_000, base=50_000_000, limit=100_000_000, phase="backward"))
    hopeless = {one for one in candidates if one != failed and search.is_hopeless(one)}
    assert Candidate(0, 4, 2, 2) in hopeless
    assert not [one for one in hopeless if one.stage > 1 or one.micro_batch < 4 or one.checkpointing != "off"]
    tried = set()
    while (candidate := search.next()) is not None and len(tried) < 12:
        tried.add(candidate)
        search.add(candidate, _measured(random.Random(len(tried)).uniform(1, 9)))
    assert not tried & hopeless


# --- beliefs


def test_a_belief_is_bayesian_linear_regression() -> None:
    """Oracle: the closed form, θ = (S⁻¹ + JᵀN⁻¹J)⁻¹ JᵀN⁻¹ y (Bishop, PRML, 3.53), for a formula that is linear."""
    points = [Point(Candidate(2, 2**k, 1, 2), 0.3 * k + 0.1, 0.05) for k in range(5)]
    belief = Belief(lambda one, theta: theta[0] * math.log2(one.micro_batch) + theta[1], (0.7, 0.4), 1e-6)
    belief.learn(points)
    j = torch.tensor([[float(k), 1.0] for k in range(5)], dtype=torch.float64)
    y = torch.tensor([point.value for point in points], dtype=torch.float64)
    precision = torch.diag(torch.tensor([0.7**-2, 0.4**-2], dtype=torch.float64)) + j.T @ j / 0.05**2
    theta = torch.linalg.solve(precision, j.T @ y / 0.05**2)
    assert belief.theta == pytest.approx(theta.tolist(), abs=1e-4)
    (there,) = belief.at([Candidate(2, 64, 1, 2)])
    x = torch.tensor([6.0, 1.0], dtype=torch.float64)
    assert there.mean == pytest.approx(float(x @ theta), abs=1e-3)
    assert there.sd == pytest.approx(math.sqrt(float(x @ torch.linalg.solve(precision, x))), rel=1e-3)


def test_what_was_measured_is_believed_and_what_is_like_it_nearly() -> None:
    belief = Belief(lambda one, theta: theta[0], (1e-6,), 0.1)
    known = Candidate(2, 4, 1, 2)
    belief.learn([Point(known, 0.08, 1e-4)])
    near, far = belief.at([known, Candidate(0, 64, 1, 2, "units", "optimizer on nvme")])
    assert near.mean == pytest.approx(0.08, abs=1e-3)
    assert near.sd < 0.01 < far.sd
    assert abs(far.mean) < 0.02
    assert distance(known, known) == 0


def test_improvement_and_probability() -> None:
    """Oracle: of a standard normal value, E[max(0, -x)] = 1/√(2π), and half of it is below its mean."""
    assert improvement(Expected(0.0, 1.0), 0.0) == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert improvement(Expected(5.0, 1e-6), 0.0) == pytest.approx(0.0)
    assert improvement(Expected(-2.0, 1e-6), 0.0) == pytest.approx(2.0)
    assert below(Expected(1.0, 0.3), 1.0) == pytest.approx(0.5)


def test_probes_give_the_constants_of_a_machine(expectation: Expectation) -> None:
    """Oracle: the constants with which the measurements were made up."""
    truth = Calibration(compute=2.0, link=3.0, overhead=4e-3, states=1.2, activations=1.5, base=60e6)
    candidates = Space(micro_batch=(1, 2, 4, 8, 16, 32)).candidates(2, 64)
    search = Search(candidates, expectation)
    for candidate in candidates[::3]:
        peak = int(expectation.memory(candidate, truth))
        search.add(candidate, replace(_measured(expectation.seconds(candidate, truth), peak), base=60_000_000))
    rest = [one for one in candidates if one not in search.tried]
    seconds = [math.exp(one.mean) for one in search.expected_seconds(rest)]
    nbytes = [math.exp(one.mean) for one in search.expected_bytes(rest)]
    assert seconds == pytest.approx([expectation.seconds(one, truth) for one in rest], rel=0.03)
    assert nbytes == pytest.approx([expectation.memory(one, truth) for one in rest], rel=0.02)


def test_the_search_ends_at_the_best_of_a_machine_with_other_constants(expectation: Expectation) -> None:
    candidates = Space(micro_batch=(1, 2, 4, 8, 16)).candidates(2, 32)
    for seed in range(2):
        chance = random.Random(seed)
        truth = Calibration(*[math.exp(chance.gauss(0, 0.5)) for _ in range(5)], overhead=3e-3)
        seconds = {one: expectation.seconds(one, truth) for one in candidates}
        search = Search(candidates, expectation)
        while len(search.tried) < 10 and (candidate := search.next()) is not None:
            search.add(candidate, _measured(seconds[candidate] * math.exp(chance.gauss(0, 0.01))))
        assert search.best is not None
        assert seconds[search.best] <= 1.03 * min(seconds.values())
        assert "within the noise" in search.ended


def test_settings_that_scatter_are_probed_again_before_one_is_called_the_best(expectation: Expectation) -> None:
    """Oracle: two settings of 1.00 and 1.03 s whose steps scatter by a tenth, one first seen at its unlucky moments."""
    first, second, third = SMALL.candidates(2, 16)[:3]
    unlucky = Outcome("measured", (2.0, 0.9, 1.08, 1.2, 1.05), 100_000_000, base=50_000_000)
    lucky = Outcome("measured", (2.0, 0.9, 1.1, 1.0, 1.06), 100_000_000, base=50_000_000)
    slow = Outcome("measured", (2.0, *[5.0] * 4), 100_000_000, base=50_000_000)
    search = Search([first, second, third], expectation, limit=10**12)
    for one, outcome in ((first, unlucky), (second, lucky), (third, slow)):
        search.add(one, outcome)
    assert search.best == second
    exact = {first: _measured(1.00), second: _measured(1.03)}
    while (again := search.next()) is not None:
        search.add(again, exact[again])
    assert search.best == first
    assert 4 <= search.probes <= 7
    assert search.ended
    assert len(search.tried[first].steps) > 5


def test_a_setting_that_fails_when_it_is_probed_again_has_failed() -> None:
    failed = Outcome("out of memory", phase="backward", limit=100)
    assert _measured(1.0).with_more(failed) == failed
    assert _measured(1.0).with_more(_measured(2.0)).steps == (2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)


def test_objectives_choose_by_what_they_say(expectation: Expectation) -> None:
    slow_small, fast_large = Candidate(3, 1, 8, 2), Candidate(0, 8, 1, 2)
    alone = Candidate(0, 16, 1, 1)
    outcomes = {
        slow_small: _measured(2.0, 100_000_000),
        fast_large: _measured(1.0, 300_000_000),
        alone: _measured(1.8, 400_000_000),
    }
    best = {}
    for objective in ("tokens_per_second", "memory", "cost"):
        search = Search(list(outcomes), expectation, objective)
        for candidate, outcome in outcomes.items():
            search.add(candidate, outcome)
        best[objective] = search.best
    assert best == {"tokens_per_second": fast_large, "memory": slow_small, "cost": alone}


def test_a_search_in_which_nothing_fits_ends(expectation: Expectation) -> None:
    search = Search(SMALL.candidates(2, 16), expectation, limit=6e7)
    count = 0
    while (candidate := search.next()) is not None:
        count += 1
        search.add(
            candidate, Outcome("out of memory", peak=59_000_000, base=50_000_000, limit=60_000_000, phase="load")
        )
    assert count < 32
    assert search.best is None
    assert search.ended


# --- calibrations


def test_a_calibration_is_kept_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_calibration() is None
    found = Calibration(compute=1.5, link=0.5, states=1.1, activations=1.3, base=2e8, probes=7)
    path = write_calibration(found)
    assert path is not None
    assert path.is_relative_to(tmp_path)
    assert read_calibration() == found
    machine = found.applied(MACHINE)
    assert machine.flops(None) == pytest.approx(MACHINE.flops(None) / 1.5)
    assert machine.tensor_link().bandwidth == pytest.approx(2 * MACHINE.tensor_link().bandwidth)
    assert (machine.slack, machine.context) == (pytest.approx(0.3), 2e8)
    # A later look at the machine, twice as fast for the noise, is not believed; four ranks share the same cores.
    later = replace(MACHINE, gpus=4, gpu=MACHINE.gpu._replace(peak=2 * MACHINE.gpu.peak, intra=1.0))
    kept = found.of(MACHINE).applied(later)
    assert kept.flops(None) == pytest.approx(MACHINE.flops(None) / 1.5 / 2)
    assert kept.gpu.intra == pytest.approx(MACHINE.gpu.intra / 0.5)
    path.write_text("{")
    assert read_calibration() is None


# --- the page's frontier


def test_the_frontier_is_what_nothing_beats() -> None:
    """By hand: more memory to the right, speed upwards, which is a small y."""
    assert frontier([(1, 9), (2, 5), (3, 7), (4, 2)], right=10) == "M1.0 9.0H2.0V5.0H4.0V2.0H10.0"


# --- stored measurements

STORED = {data.problem.case: data for data in tuning.stored()}


def test_the_stored_spaces_are_whole() -> None:
    models = json.loads(tuning.DATA.read_text())["models"]
    for case, data in STORED.items():
        problem = data.problem
        assert set(data.outcomes) == set(problem.space.candidates(tuning.RANKS, problem.global_batch))
        kinds = [known.kind for known in data.outcomes.values()]
        assert 0 < kinds.count("out of memory") < len(kinds) / 2
        assert kinds.count("measured") + kinds.count("out of memory") == len(kinds)
        assert isinstance(models[case]["provisional"], bool)


@pytest.mark.parametrize("case", STORED)
def test_the_search_finds_what_is_stored(case: str) -> None:
    """The bar of nine in ten is held by `python benchmarks/tuning.py --search`; here are three of its repetitions.

    On data of a loaded machine settings' times are no measure, and only that it ends and measures is asked for.
    """
    data = STORED[case]
    expectation = Expectation(tuning.workload(data.problem), data.machine)
    runs = [tuning.replay(data, expectation, seed) for seed in range(3)]
    assert all(run.probes <= tuning.PROBES and run.excess < math.inf for run in runs)
    errors = sorted(error for run in runs for error in run.byte_errors[1])
    assert errors[len(errors) // 2] <= 0.05
    if not data.provisional:
        assert sum(run.excess <= 0.03 for run in runs) >= 2
