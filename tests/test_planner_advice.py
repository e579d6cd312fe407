"""The search and its advice, held against the paper's measured sizes and against what the formulas alone imply."""

from __future__ import annotations

import tomllib

import pytest

from onecopy.errors import SettingsError
from onecopy.planner.activations import checkpoint_bytes
from onecopy.planner.advice import Wishes, advise, options
from onecopy.planner.buffers import with_overheads
from onecopy.planner.estimate import Job, Option, estimate
from onecopy.planner.machine import Machine, gpu_of, with_link
from onecopy.planner.memory import model_state_bytes
from onecopy.planner.paste import as_dict, config_toml, shard_call
from onecopy.planner.quantities import count, gigabytes, parse_bytes, parse_count, parse_rate, rate
from onecopy.planner.redundancy import redundancy
from onecopy.planner.shape import from_count, from_sizes
from onecopy.planner.step import CATEGORIES
from onecopy.planner.sweep import HURTS, crossover, curves, parse_range, thresholds
from onecopy.recipes.settings import load

EIGHT = Machine(8, gpu_of("h100", memory=24e9))
JOB = Job(from_count(7.5e9), 2048)


@pytest.mark.parametrize("billions, stage, fits", [(1.3, 0, True), (2.0, 0, False), (6.2, 1, True), (7.0, 1, False)])
def test_table_2s_measured_sizes_are_bracketed(billions: float, stage: int, fits: bool) -> None:
    """ZeRO Table 2: on 32 GB with N = 64, 1.3B ran without sharding and 6.2B at stage 1; the bounds say 2B and 7.6B.

    The paper's states (16-bit gradients), checkpoints of 8 samples of 1024 tokens and the planner's own overheads.
    """
    sizes = from_count(billions * 1e9).transformer
    assert sizes is not None
    live = model_state_bytes(stage, billions * 1e9, 64).total
    live += checkpoint_bytes(8, 1024, sizes.hidden, sizes.layers)
    assert (with_overheads(live) <= 32e9) is fits


def test_7b_does_not_fit_where_stage_1_keeps_whole_gradients() -> None:
    """ZeRO Table 2: 32 GB V100s, N = 64. With one micro-batch the engine sends gradients as they come and keeps none
    whole, so that 7B does fit, as at stage 2; with more it keeps them, as the paper's does (in fp32, for accuracy)."""
    machine = Machine(64, gpu_of("v100"), nodes=4)
    job = Job(from_count(7e9), 1024, "fp16")
    for accumulate, fits in ((1, True), (2, False)):
        option = Option(1, 1, accumulate, "units", "none", 64)
        assert estimate(job, machine, option).fits is fits


def test_the_best_is_the_fastest_that_fits() -> None:
    """Oracle: the whole list of options, looked through here."""
    for preset, margin in (("safe", 0.15), ("fast", 0.05), ("frugal", 0.05)):
        machine = Machine(8, gpu_of("h100", memory=40e9))
        advice = advise(JOB, machine, Wishes(global_batch=256, preset=preset))  # type: ignore[arg-type]
        usable = [e for e in advice.estimates if e.available and e.peak <= (1 - margin) * 40e9]
        assert advice.best is not None
        assert advice.best in usable
        if preset == "frugal":
            assert advice.best.peak <= min(e.peak for e in usable) + 0.02 * 40e9
        else:
            assert advice.best.tokens_per_second >= 0.97 * max(e.tokens_per_second for e in usable)


def test_nothing_is_recommended_that_onecopy_does_not_have() -> None:
    advice = advise(JOB, EIGHT, Wishes(global_batch=256))
    assert advice.best is not None
    assert not advice.best.option.missing
    offloaded = [e for e in advice.estimates if e.option.offload != "none"]
    assert offloaded
    assert not any(e.available for e in offloaded)
    assert advice.runner_up is None or advice.runner_up.available


def test_the_reason_is_two_sentences_with_the_numbers() -> None:
    advice = advise(JOB, EIGHT, Wishes(global_batch=256))
    assert advice.best is not None
    assert advice.reason.count(". ") == 1
    assert advice.reason.endswith(".")
    assert gigabytes(advice.best.peak) in advice.reason
    assert f"{advice.best.tokens_per_second:,.0f} tokens/s" in advice.reason


def test_remedies_fit_and_say_what_is_missing() -> None:
    """Each remedy is an option that was tried: its peak is below what may be used on its machine."""
    job = Job(from_count(30e9), 4096)
    advice = advise(job, EIGHT, Wishes(global_batch=64))
    assert advice.best is None
    assert advice.remedies
    for remedy in advice.remedies:
        assert remedy.found.peak <= 0.95 * remedy.found.limit * 1.0001
        assert remedy.available is not ("does not have yet" in remedy.words)
    ready = [remedy.available for remedy in advice.remedies]
    assert ready == sorted(ready, reverse=True), "what can be done today comes first"


def test_more_gpus_are_the_smallest_power_of_two_that_fits() -> None:
    advice = advise(Job(from_count(30e9), 2048), EIGHT, Wishes(global_batch=64))
    words = next(r.words for r in advice.remedies if "GPUs, on" in r.words)
    needed = int(words.split()[0])
    half = Machine(needed // 2, EIGHT.gpu, nodes=max(1, needed // 16))
    again = advise(Job(from_count(30e9), 2048), half, Wishes(global_batch=8 * needed // 2))
    assert again.best is None


def test_options_split_the_batch_in_every_way() -> None:
    found = {(o.micro_batch, o.accumulate) for o in options(JOB, EIGHT, Wishes(global_batch=96))}
    assert found == {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}
    with pytest.raises(SettingsError, match="the nearest that can are 96 and 104"):
        list(options(JOB, EIGHT, Wishes(global_batch=100)))
    with pytest.raises(SettingsError, match="take a divisor of 12"):
        list(options(JOB, EIGHT, Wishes(global_batch=96, micro_batch=5)))


def test_hybrid_sharding_is_looked_at_on_several_nodes() -> None:
    machine = Machine(32, gpu_of("a100"), nodes=4)
    shards = {(o.stage, o.shard, o.replicate) for o in options(JOB, machine, Wishes())}
    assert {(3, 32, 1), (3, 8, 4), (0, 32, 1)} <= shards
    assert (0, 8, 4) not in shards


def test_partitioned_checkpoints_ask_for_tensor_parallelism() -> None:
    kinds = {o.checkpointing for o in options(JOB, EIGHT, Wishes())}
    assert kinds == {"off", "units"}
    split = Job(from_count(7.5e9), 2048, tensor_parallel=2)
    assert {o.checkpointing for o in options(split, EIGHT, Wishes())} == {"off", "units", "P_a", "P_a+cpu"}


def test_offloading_moves_bytes_to_the_host() -> None:
    """ZeRO-Offload: the device keeps 2Ψ of parameters at stage 2, nothing of gradients' slices and the optimizer."""
    plain, moved = (
        estimate(JOB, EIGHT, Option(2, 1, 1, "units", offload, 8))  # type: ignore[arg-type]
        for offload in ("none", "optimizer on cpu")
    )
    step = moved.peaks["step"]
    assert step["optimizer"] == step["gradients_sliced"] == step["parameters_sliced"] == 0
    assert step["parameters_gathered"] == pytest.approx(2 * 7.5e9, rel=0.001)
    assert moved.host - plain.host >= 8 * 12 * 7.5e9 / 8
    assert moved.seconds.total > plain.seconds.total


def test_every_phase_has_every_category() -> None:
    found = estimate(JOB, EIGHT, Option(3, 1, 1, "off", "none", 8))
    assert list(found.peaks) == ["load", "forward", "backward", "step", "save"]
    assert all(set(sizes) == set(CATEGORIES) for sizes in found.peaks.values())
    assert found.peaks["step"]["optimizer_temporaries"] == pytest.approx(4 * 7.5e9 / 8, rel=0.001)
    assert found.loads_on_meta


# --- what if


def test_sweep_falls_and_the_crossover_is_where_the_ratio_says() -> None:
    option = Option(3, 1, 16, "off", "none", 8)
    swept = curves(JOB, EIGHT, option, 1.25e10, 1e12)
    for curve in swept:
        times = [time for _, time in curve.points]
        assert times == sorted(times, reverse=True)
    at = crossover(JOB, EIGHT, option, 1.25e10, 1e12)
    assert at is not None
    two, three = (estimate(JOB, with_link(EIGHT, at), Option(s, 1, 16, "off", "none", 8)).seconds.total for s in (2, 3))
    assert three / two == pytest.approx(HURTS, rel=0.01)


def test_thresholds_name_the_side_that_hurts() -> None:
    found = {t.quantity: t for t in thresholds(JOB, EIGHT, Option(3, 2, 16, "off", "none", 8))}
    assert set(found) == {"bandwidth", "latency", "tokens a rank in a micro-batch", "parameters"}
    assert found["bandwidth"].hurts == "below"
    assert found["latency"].hurts == "above"
    tokens = found["tokens a rank in a micro-batch"].at
    assert tokens is not None
    assert 200 < tokens < 10_000


def test_a_range_is_read() -> None:
    assert parse_range("link=10gbit..800gbit") == ("link", 1.25e9, 1e11)
    for wrong in ("link", "link=10gbit", "link=800gbit..10gbit", "memory=1GB..2GB"):
        with pytest.raises(SettingsError, match="sweep"):
            parse_range(wrong)


def test_redundancy() -> None:
    """K = 12: a second copy of 12Ψ/N bytes; one failure of any rank is then survived for sure."""
    plan = estimate(JOB, EIGHT, Option(1, 1, 1, "off", "none", 8))
    found = redundancy(JOB, EIGHT, plan, 2)
    assert found.memory == pytest.approx(12 * 7.5e9 / 8)
    assert found.survival[1] == 1
    assert found.lost_with < found.lost_without
    with pytest.raises(SettingsError, match="between 1 and the 8 ranks"):
        redundancy(JOB, EIGHT, plan, 9)


# --- what is pasted


def test_the_config_is_one_that_train_takes(tmp_path: object) -> None:
    """Oracle: onecopy train's own reader."""
    advice = advise(JOB, EIGHT, Wishes(global_batch=256))
    assert advice.best is not None
    text = config_toml(JOB, EIGHT, advice.best, None)
    path = tmp_path / "plan.toml"  # type: ignore[operator]
    path.write_text(text)
    config = load(str(path), {})
    option = advice.best.option
    assert config.parallel.stage == option.stage == tomllib.loads(text)["parallel"]["stage"]
    assert config.parallel.accumulate == option.accumulate
    assert config.data.batch == 256


def test_the_call_is_python_that_names_the_choice() -> None:
    hybrid = estimate(JOB, Machine(16, gpu_of("h100"), nodes=2), Option(3, 1, 4, "off", "none", 8, 2))
    call = shard_call(JOB, hybrid)
    compile(call, "call", "exec")
    assert 'onecopy.shard(model, stage=3, precision="bf16", mesh=mesh, accumulate=4)' in call
    assert '("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))' in call


def test_the_plan_as_data() -> None:
    advice = advise(JOB, EIGHT, Wishes(global_batch=256))
    data = as_dict(JOB, EIGHT, advice)
    assert data["best"]["fits"]
    assert len(data["options"]) == len(advice.estimates)
    assert all(entry["missing"] for entry in data["options"] if not entry["available"])


# --- words


@pytest.mark.parametrize(
    "parse, text, value",
    [
        (parse_bytes, "24GB", 24e9),
        (parse_bytes, "24GiB", 24 * 2**30),
        (parse_bytes, "512MB", 512e6),
        (parse_bytes, "1000", 1000),
        (parse_rate, "400gbit", 50e9),
        (parse_rate, "400Gbit/s", 50e9),
        (parse_rate, "450GB/s", 450e9),
        (parse_rate, "25Gbps", 25e9),
        (parse_count, "7.5e9", 7.5e9),
        (parse_count, "7.5B", 7.5e9),
        (parse_count, "350M", 350e6),
        (parse_count, "1T", 1e12),
    ],
)
def test_quantities(parse: object, text: str, value: float) -> None:
    assert parse(text) == value  # type: ignore[operator]


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_count])
def test_quantities_that_cannot_be_read(parse: object) -> None:
    for wrong in ("", "GB", "24 apples", "-1"):
        with pytest.raises(SettingsError, match="must be written like"):
            parse(wrong)  # type: ignore[operator]


def test_words_for_quantities() -> None:
    assert (gigabytes(24e9), gigabytes(5e6)) == ("24.00 GB", "5.0 MB")
    assert rate(50e9) == "400 Gbit/s"
    assert (count(7.5e9), count(124e6)) == ("7.5 B", "124 M")
    assert from_sizes(2, 8).parameters > 0
