"""Which option is taken, and the words for it. Oracles: all options, compared here one by one; hand-made machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onecopy.errors import SettingsError
from onecopy.planner.answer.advice import Wishes, _undominated, advise, options
from onecopy.planner.answer.estimate import Job, Option, estimate
from onecopy.planner.formulas.activations import HIDDEN_COPIES
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.schedule import Unit
from onecopy.planner.model.shape import Checkpointing, Shape, Transformer, from_count

JOB = Job(from_count(1.3e9), 2048)
EIGHT = Machine(8, gpu_of("h100"))


@pytest.mark.parametrize("preset", ["fast", "safe", "frugal"])
@pytest.mark.parametrize("batch", [64, 256])
def test_what_is_taken_is_beaten_by_nothing(preset: str, batch: int) -> None:
    """No other option that fits is as fast, holds as little on device and host, and is better in one of the three."""
    advice = advise(JOB, EIGHT, Wishes(global_batch=batch, preset=preset))  # type: ignore[arg-type]
    best = advice.best
    assert best is not None
    room = (0.85 if preset == "safe" else 0.95) * EIGHT.gpu.memory
    for other in advice.estimates:
        if other.available and other.fits and other.peak <= room:
            better = (other.tokens_per_second - best.tokens_per_second, best.peak - other.peak, best.host - other.host)
            assert min(better) < 0 or max(better) == 0, other.option.words()


def test_the_front_keeps_what_is_best_in_something() -> None:
    found = [estimate(JOB, EIGHT, Option(stage, 1, 1, "units", "none", 8)) for stage in range(4)]
    first = replace(found[0], tokens_per_second=100.0, host=1.0)
    slower = replace(first, tokens_per_second=90.0)
    assert _undominated([slower, first]) == [first]
    smaller = replace(slower, host=0.5)
    assert _undominated([slower, smaller, first]) == [first, smaller]


def test_selective_recomputation_is_taken_before_whole_where_it_fits() -> None:
    """Oracles: the three kinds one by one, on GPUs just large enough for each."""
    wishes = Wishes(stage=3, micro_batch=8, tensor=1)
    peaks, times = {}, {}
    for kind in ("off", "selective", "units"):
        found = estimate(JOB, EIGHT, Option(3, 8, 1, kind, "none", 8))  # type: ignore[arg-type]
        peaks[kind], times[kind] = found.peak, found.seconds.total
    assert peaks["off"] > 1.2 * peaks["selective"] > 1.4 * peaks["units"]
    assert times["off"] < times["selective"] < times["units"]
    for kind, peak in peaks.items():
        gpu = EIGHT.gpu._replace(memory=1.06 * peak)
        best = advise(JOB, replace(EIGHT, gpu=gpu, host_memory=20e9), wishes).best
        assert best is not None
        assert best.option.checkpointing == kind


def test_selective_recomputation_costs_less_than_one_that_repeats_half_of_the_products() -> None:
    """Oracle: torchtitan's docs/performance.md, Llama-2-13B on 64 A100: 2,162 tokens a second and GPU without
    recomputation, 1,904 with one that repeats every second product too; whole recomputation repeats them all."""
    layers, hidden, wide, table = 40, 5120, 13_824, 32_000 * 5120
    block = (hidden * hidden,) * 4 + (hidden * wide,) * 3 + (hidden, hidden)
    features = 5 * hidden + 2 * wide
    units = (Unit("", (table, table)), *(Unit(f"layers.{i}", block, features=features) for i in range(layers)))
    sizes = Transformer(layers, hidden, 40, 32_000, HIDDEN_COPIES["llama"], idle=table)
    job, machine = Job(Shape("llama2-13b", units, sizes), 4096), Machine(64, gpu_of("a100"), nodes=8)
    kinds: tuple[Checkpointing, ...] = ("off", "selective", "units")
    off, selective, whole = (estimate(job, machine, Option(3, 2, 1, kind, "none", 64)) for kind in kinds)
    published = 1 - 1904 / 2162
    assert 0.005 < 1 - selective.tokens_per_second / off.tokens_per_second < published
    assert 1 - whole.tokens_per_second / off.tokens_per_second > published


def test_selective_recomputation_is_planned_where_products_are_known() -> None:
    plain = replace(JOB.shape, units=tuple(replace(unit, features=0) for unit in JOB.shape.units))
    assert "selective" not in {o.checkpointing for o in options(replace(JOB, shape=plain), EIGHT, Wishes())}
    with pytest.raises(SettingsError, match="give a factory with example_inputs"):
        advise(replace(JOB, shape=plain), EIGHT, Wishes(checkpointing="selective"))


def test_a_vocabulary_that_ranks_cannot_share_is_not_cut() -> None:
    """GPT-2's 50,257 tokens: two ranks would have half a token more each."""
    assert JOB.shape.transformer is not None
    odd = replace(JOB.shape, transformer=replace(JOB.shape.transformer, vocabulary=50_257))
    for shape, expected in ((JOB.shape, True), (odd, False)):
        found = options(replace(JOB, shape=shape), EIGHT, Wishes(tensor=2))
        assert {option.sequence for option in found} == {expected}


def test_one_gpu_is_told_to_shard_nothing() -> None:
    """Of one rank there is nothing to share; where stage 0 does not fit, units that are cast one by one still help."""
    one = Machine(1, gpu_of("rtx4090"))
    advice = advise(Job(from_count(3e8), 1024), one)
    for found in (advice.best, advice.runner_up):
        assert found is not None
        assert (found.option.stage, found.option.offload) == (0, "none") or found.option.offload != "none"
    assert advice.best is not None
    assert advice.best.option.stage == 0


def test_activations_stay_on_the_device_where_the_host_is_too_small() -> None:
    """A host is taken for twice its GPUs' memory: of 24 GB, 48; `--host-memory` says otherwise."""
    card = Machine(1, gpu_of("rtx4090", memory=24e9))
    option = Option(3, 1, 1, "units", "parameters on cpu", 1)
    job = Job(from_count(6e9), 512)
    assert estimate(job, card, option).host > 48e9
    assert not estimate(job, card, option).fits
    assert estimate(job, replace(card, host_memory=256e9), option).fits


def test_the_link_that_limits_is_named() -> None:
    """Copies on eight nodes, a copy within each: what is slow is between nodes when that link is next to nothing."""
    option = Option(1, 1, 1, "off", "none", 8, 8)
    slow = Machine(64, gpu_of("h100"), nodes=8, link=1e8)
    assert estimate(JOB, slow, option).limited_by == "the link between nodes"
    narrow = Machine(64, gpu_of("h100", intra=1e8), nodes=8, link=50e9)
    assert estimate(JOB, narrow, option).limited_by == "the link within a node"


def test_as_much_is_not_called_less() -> None:
    advice = advise(JOB, EIGHT, Wishes(global_batch=64))
    assert "holds 0.0 MB" not in advice.reason
