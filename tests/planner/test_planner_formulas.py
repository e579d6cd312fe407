"""The planner's formulas against the numbers that the ZeRO paper prints (arXiv 1910.02054)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onecopy.errors import SettingsError
from onecopy.memory import staging
from onecopy.planner.engine.step import held_between_steps
from onecopy.planner.formulas import activations, buffers, offload, recovery
from onecopy.planner.formulas.memory import largest_model, model_state_bytes
from onecopy.planner.formulas.time import Link, all_reduce_seconds, gather_seconds, hiding_tokens, overlap, step_flops
from onecopy.planner.formulas.traffic import step_elements
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.schedule import Schedule, Unit
from onecopy.planner.model.shape import from_count, from_sizes
from onecopy.sharding.engine import order
from onecopy.sharding.tensor.precision import PIECE_NUMEL

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}

# GB per device for stages 1, 2, 3; * is bold in the paper: the first to fit a 32 GB device.
TABLE_1 = """
1     120  120  120     2048 2048 2048    16000 16000 16000
4     52.5 41.3 30*     896  704  512     7000  5500  4000
16    35.6 21.6* 7.5    608  368  128     4750  2875  1000
64    31.4* 16.6 1.88   536  284  32*     4187  2218  250
256   30.4 15.4 0.47    518  263  8       4046  2054  62.5
1024  30.1 15.1 0.12    513  257  2       4011  2013  15.6*
"""


def table_1() -> list[tuple[int, str, int, float, bool]]:
    cells = []
    for row in TABLE_1.strip().splitlines():
        ranks, *values = row.split()
        places = [(size, stage) for size in SIZES for stage in (1, 2, 3)]
        for (size, stage), value in zip(places, values, strict=True):
            cells.append((int(ranks), size, stage, float(value.strip("*")), "*" in value))
    return cells


def test_table_1_has_all_its_cells() -> None:
    assert len(table_1()) == 54


@pytest.mark.parametrize("ranks, size, stage, gigabytes, fits", table_1())
def test_table_1(ranks: int, size: str, stage: int, gigabytes: float, fits: bool) -> None:
    found = model_state_bytes(stage, SIZES[size], ranks).total / 1e9
    # The paper truncates large integers and rounds small ones to two decimals.
    assert found == pytest.approx(gigabytes, rel=0.005, abs=1.0 if gigabytes > 100 else 0.05)
    if fits:
        assert found <= 32


@pytest.mark.parametrize("stage, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1(stage: int, gigabytes: float) -> None:
    assert model_state_bytes(stage, 7.5e9, 64).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    "model_parallel, none, first, second, third",
    [
        (1, 2, 7.6, 14.4, 128),
        (2, 4, 15.2, 28.8, 256),
        (4, 8, 30.4, 57.6, 512),
        (8, 16, 60.8, 115.2, 1024),
        (16, 32, 121.6, 230.4, 2048),
    ],
)
def test_table_2_bounds(model_parallel: int, none: float, first: float, second: float, third: float) -> None:
    for stage, billions in enumerate((none, first, second, third)):
        found = largest_model(stage, 32e9, 64, model_parallel=model_parallel) / 1e9
        assert found == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("model_parallel", [1, 2, 4, 8, 16])
def test_table_2_measured_is_a_fixed_share_of_the_bound(model_parallel: int) -> None:
    """ZeRO Table 2: what ran is 1.3B and 6.2B times M; 81 to 82 % of the bound at stage 1, 62 to 65 % without."""
    measured = {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5, 25), 8: (10, 50), 16: (20, 100)}[model_parallel]
    without, first = (largest_model(s, 32e9, 64, model_parallel=model_parallel) / 1e9 for s in (0, 1))
    assert 0.62 <= measured[0] / without <= 0.66
    assert 0.80 <= measured[1] / first <= 0.83


def test_states_are_split_by_what_the_stage_shards() -> None:
    assert model_state_bytes(2, 100, 4) == (200, 50, 300)
    assert model_state_bytes(3, 100, 4, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8) == (100, 100, 200)


@pytest.mark.parametrize("stage, times_psi", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_section_7(stage: int, times_psi: int) -> None:
    assert step_elements(stage, 1000, 4).total == times_psi * 750
    assert step_elements(stage, 1000, 1).total == 0


@pytest.mark.parametrize("stage, times_psi", [(0, 2), (1, 2), (2, 9), (3, 24)])
def test_traffic_with_eight_micro_batches(stage: int, times_psi: int) -> None:
    assert step_elements(stage, 1000, 2, micro_batches=8).total == times_psi * 500


def test_traffic_by_operation() -> None:
    assert step_elements(0, 600, 3) == (0, 0, 800)
    assert step_elements(1, 600, 3, micro_batches=2) == (400, 400, 0)
    assert step_elements(2, 600, 3, micro_batches=2) == (400, 800, 0)
    assert step_elements(3, 600, 3, micro_batches=2) == (1600, 800, 0)


def test_hybrid_sharding_all_reduces_the_slice() -> None:
    # 8 ranks as 2 copies of 4: a slice of 200 of 800 elements, all-reduced over 2 ranks.
    assert step_elements(3, 800, 4, replicate=2) == (2 * 600, 600, 2 * 200 / 2)
    # Stage 0 has one all-reduce over all 8.
    assert step_elements(0, 800, 4, replicate=2) == (0, 0, 1400)


def test_stage_out_of_range() -> None:
    with pytest.raises(SettingsError, match="found 4"):
        step_elements(4, 1000, 2)
    with pytest.raises(SettingsError, match="found -1"):
        model_state_bytes(-1, 1000, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_engine_holds_beside_the_paper(stage: int) -> None:
    """After a step: gradients are fp32 where the paper has 16 bits; whole 16-bit parameters go from stage 1 on."""
    units = [Unit("", (1024,)), *(Unit(f"blocks.{i}", (64_000, 8192)) for i in range(10))]
    parameters = sum(unit.parameters for unit in units)
    held = held_between_steps(units, Schedule(stage, 8))
    shards = 8 if stage else 1
    paper = model_state_bytes(stage, parameters, 8).total
    states = sum(held.values()) - held["communication"]
    assert states == pytest.approx((16 / shards if stage else 18) * parameters, rel=0.001)
    if stage == 3:
        assert states == pytest.approx(paper, rel=0.001)


# --- activations


def test_activations_of_100b() -> None:
    """ZeRO §3.2, §6.1: b 32, s 1024, h 8192, L 125; the paper's 33 GB is one byte an element, its ratio of 16 holds."""
    whole = activations.checkpoint_bytes(32, 1024, 8192, 125)
    assert whole / 1e9 == pytest.approx(67.1, abs=0.05)
    assert activations.checkpoint_bytes(32, 1024, 8192, 125, element_bytes=1) / 1e9 == pytest.approx(33, abs=0.6)
    split = activations.checkpoint_bytes(32, 1024, 8192, 125, model_parallel=16, partitioned=True)
    assert split / 1e9 == pytest.approx(4.19, abs=0.01)
    assert whole / split == 16
    assert activations.checkpoint_bytes(32, 1024, 8192, 125, model_parallel=16, partitioned=True, on_cpu=True) == 0


def test_activations_of_gpt2() -> None:
    """ZeRO §3.2: 1.5B, b 32, s 1024: 60 GB in all; checkpoints and one layer's working set are about 8 GB."""
    assert activations.total_bytes_estimate(32, 1024, 1600, 48) / 1e9 == pytest.approx(60.4, abs=0.05)
    kept = activations.checkpoint_bytes(32, 1024, 1600, 48)
    assert kept / 1e9 == pytest.approx(5.0, abs=0.05)
    working = activations.working_bytes(32, 1024, 1600, 25)
    assert kept + working == pytest.approx(8e9, rel=0.1)


@pytest.mark.parametrize(
    "options, factor",
    [
        ({}, 34 + 5 * 96 * 2048 / 12288),
        ({"tensor_parallel": 8}, 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8)),
        ({"tensor_parallel": 8, "sequence_parallel": True}, (34 + 5 * 96 * 2048 / 12288) / 8),
        ({"tensor_parallel": 8, "sequence_parallel": True, "recompute": "selective"}, 34 / 8),
        ({"fused_attention": True}, 34),
        ({"recompute": "full"}, 2),
    ],
)
def test_korthikanti_factors(options: dict[str, object], factor: float) -> None:
    """Korthikanti et al.: bytes of a GPT-3 layer (a 96, s 2048, h 12288) in units of sbh."""
    found = activations.layer_bytes(4, 2048, 12288, 96, **options)  # type: ignore[arg-type]
    assert found == pytest.approx(factor * 4 * 2048 * 12288)


def test_tensor_parallel_traffic_grows_by_less_than_a_tenth_with_partitioning() -> None:
    """ZeRO §8: 12bsh a block, bsh more with P_a."""
    plain = activations.block_parallel_elements(2, 1024, 4096)
    split = activations.block_parallel_elements(2, 1024, 4096, partitioned=True)
    assert plain == 12 * 2 * 1024 * 4096
    assert split / plain - 1 == pytest.approx(0.083, abs=0.001)
    assert activations.block_parallel_elements(2, 1024, 4096, recompute=False) == 8 * 2 * 1024 * 4096


@pytest.mark.parametrize(
    "name, stage, layers, hidden, partitioned, on_cpu, gigabytes",
    [
        ("C1", 1, 50, 8192, False, False, 24.7),
        ("C2", 1, 132, 6144, True, False, 18.4),
        ("C3", 2, 62, 8192, False, False, 24.6),
        ("C4", 2, 175, 8192, True, False, 25.5),
        ("C5", 2, 187, 8192, True, True, 24.1),
    ],
)
def test_zero_r_configurations(
    name: str, stage: int, layers: int, hidden: int, partitioned: bool, on_cpu: bool, gigabytes: float
) -> None:
    """ZeRO Table 3, Figure 6: the largest models of C1 to C5 (M 16, N 25, b 16, s 1024) come near the same limit."""
    states = model_state_bytes(stage, 12 * layers * hidden**2, 25, model_parallel=16).total
    kept = activations.checkpoint_bytes(
        16, 1024, hidden, layers, model_parallel=16, partitioned=partitioned, on_cpu=on_cpu
    )
    assert (states + kept) / 1e9 == pytest.approx(gigabytes, abs=0.15), name
    assert states + kept < 32e9


# --- buffers


def test_buffers() -> None:
    """ZeRO §3.2: a fused fp32 buffer of 3B is 12 GB. torch's pin_memory rounds up to a power of two."""
    assert buffers.fused_buffer_bytes(3e9) == 12e9
    assert [buffers.pinned_bytes(n) for n in (0, 1, 4096, 4097, 3e9)] == [0, 1, 4096, 8192, 2**32]
    assert buffers.optimizer_temporary_bytes(1000, "foreach") == 4000
    assert buffers.optimizer_temporary_bytes(1000, "fused") == 0
    assert buffers.optimizer_temporary_bytes(1000, "fused", gradient_bytes=2) == 4000
    assert buffers.optimizer_temporary_bytes(1e9, "fused", gradient_bytes=2) == 4 * PIECE_NUMEL
    # Of N slices of 2^20 elements, N are sent and N - 1 come, or one sum of them does; the buffer is there twice.
    assert buffers.staging_bytes(2 << 20, 2, 4, native=False) == 2 * 3 * 4 * 2**20
    assert buffers.staging_bytes(8 << 20, 8, 2, native=True) == 2 * 9 * 2 * 2**20
    assert buffers.staging_bytes(8 << 20, 8, 4, native=True, casts=False) == 2 * 8 * 4 * 2**20
    assert buffers.staging_bytes(8 << 20, 8, 2, native=True, all_reduces=True) == 2 * 8 * 2 * 2**20
    assert (buffers.staging_limit(native=False), buffers.staging_limit(native=True)) == (8 * 2**20, 2**32)


# --- time


def test_ring_against_nccl_on_four_nodes() -> None:
    """Bus bandwidth of all-reduce as measured on four nodes of 8 B200 over 8 × 50 GB/s, 1 MiB to 1 GiB.

    Two parameters meet a range of 70 within 40 %; 256 MiB is the worst, where NCCL is slower than its trend.
    """
    link = Link(8 * 50e9, 6e-6)
    for mebibytes, measured in ((1, 5.4), (16, 64), (64, 157), (256, 229), (1024, 362)):
        size = mebibytes * 2**20
        busbw = 2 * 31 / 32 * size / all_reduce_seconds(size, 32, link) / 1e9
        assert busbw == pytest.approx(measured, rel=0.4), mebibytes


def test_ring_has_no_other_terms() -> None:
    assert gather_seconds(8e9, 4, Link(1e9, 0)) == pytest.approx(6)
    assert gather_seconds(0, 4, Link(1e9, 1e-3)) == pytest.approx(3e-3)
    assert gather_seconds(8e9, 1, Link(1e9, 1)) == 0


def test_tokens_that_hide_stage_3_on_an_h100() -> None:
    """Some 2,200 to 2,500: utilised 0.8 to 0.9 PFLOP/s over the 361 GB/s of NCCL's all-gather on 8 H200."""
    assert 2200 <= hiding_tokens(0.85 * 989e12, 361e9) <= 2500


def test_flops() -> None:
    assert step_flops(1e9, 1000) == 6e12
    assert step_flops(1e9, 1000, recompute=True) == 8e12


@pytest.mark.parametrize("stage, times", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_communication_is_section_7s_volume_over_bandwidth(stage: int, times: int) -> None:
    """With no latency and nothing computed, a step is its traffic: 2Ψ or 3Ψ times (N-1)/N over the bandwidth."""
    found = overlap(stage, [(1e9, 1e9)] * 4, 0.0, shard=8, link=Link(1e9, 0))
    assert found.exposed == found.communication == pytest.approx(times * 4 * 7 / 8)


def test_accumulation_multiplies_stage_3_and_leaves_stage_1() -> None:
    one, many = (
        [overlap(s, [(1e9, 1e9)], 0.0, shard=2, micro_batches=g, link=Link(1e9, 0)).total for s in (1, 2, 3)]
        for g in (1, 8)
    )
    assert many == pytest.approx([one[0], one[1] / 2 * 9, one[2] * 8])


def test_messages_hide_behind_computing() -> None:
    found = overlap(3, [(1e9, 1e9)] * 4, 1000.0, shard=8, link=Link(1e9, 0))
    assert found.exposed == 0 < found.communication


# --- offload


def test_zero_infinity_efficiency() -> None:
    """ZeRO-Infinity: at 70 TFLOP/s 50 % needs 70 GB/s for parameters and gradients at b·s = 1024, four times that for
    the optimizer, and 1.4 GB/s for activations of h = 2048."""
    peak = 70e12
    states, optimizer = offload.intensity_of_parameters(1, 1024), offload.intensity_of_optimizer(1, 1024)
    assert offload.efficiency(states, 70e9, peak) == pytest.approx(0.5, abs=0.01)
    assert offload.bandwidth_for(0.5, optimizer, peak) / offload.bandwidth_for(0.5, states, peak) == 4
    assert offload.bandwidth_for(0.5, offload.intensity_of_checkpoints(2048), peak) == pytest.approx(1.4e9, rel=0.03)


def test_zero_offload_traffic() -> None:
    """ZeRO-Offload: 4Ψ bytes cross the host link in a step; 13B leaves 26 GB of parameters on a 32 GB device."""
    assert offload.offload_bytes(13e9) == 52e9
    assert 2 * 13e9 < 32e9
    assert activations.largest_linear_bytes(1000) == 16e6


# --- recovery


def test_recovery() -> None:
    """FlashRecovery's best interval; Gemini's odds; KΨ/N and (K+2)Ψ/N; Llama 3's 419 failures in 54 days."""
    assert recovery.unique_bytes(0, 1e9, 8) == 0
    assert recovery.unique_bytes(1, 1e9, 8) == 12e9 / 8
    assert recovery.unique_bytes(3, 1e9, 8) == 14e9 / 8
    assert recovery.unique_bytes(3, 1e9, 8, from_master=True) == 12e9 / 8
    assert recovery.copies_memory(2, 1e9, 8) == 12e9 / 8
    assert recovery.copies_elements(3, 1e9, 8) == 4e9 / 8
    assert recovery.survival(16, 2, 1) == 1
    assert recovery.survival(4, 2, 2) == pytest.approx(1 - 2 * 1 / 6)
    assert recovery.survival(4, 1, 1) == 0
    assert recovery.expected_failures(16_384, 54 * 86_400) == pytest.approx(419, rel=0.01)
    best = recovery.best_interval(10, 1e6, 20)
    costs = [
        recovery.lost_seconds(10, 1e6, restart=100, interval=interval, save_seconds=20)
        for interval in (best * 0.9, best, best * 1.1)
    ]
    assert min(costs) == costs[1]
    assert recovery.lost_seconds_with_copies(10, restart=100, step=5) == 1050


# --- shapes


@pytest.mark.parametrize("parameters", [1e6, 124e6, 1.3e9, 7.5e9, 128e9, 1e12])
def test_a_count_is_met_exactly(parameters: float) -> None:
    assert from_count(parameters).parameters == parameters


def test_sizes_make_a_gpt() -> None:
    """Megatron's count for GPT-2 of 1.5B: 48 layers of 1600."""
    assert from_sizes(48, 1600, vocabulary=50_257).parameters / 1e9 == pytest.approx(1.56, abs=0.01)


def test_links_of_a_machine() -> None:
    """A ring over nodes uses every network card of a node; ranks that hold the same slice use one each."""
    machine = Machine(32, gpu_of("h100"), nodes=4, link=50e9, link_efficiency=1, crowding=0)
    assert machine.shard_link(8).bandwidth == 450e9
    assert machine.shard_link(32).bandwidth == 400e9
    assert machine.replicate_link(8).bandwidth == 50e9
    with pytest.raises(SettingsError, match="did you mean 'h100'"):
        gpu_of("h1oo")


def test_what_formulas_repeat_of_the_engine_is_what_the_engine_has() -> None:
    """They import no torch, so two constants stand twice."""
    assert {"cpu": staging.CPU_BYTES, "accelerator": staging.ACCELERATOR_BYTES} == buffers.STAGING_BYTES
    assert order.PREFETCH_BYTES == buffers.PREFETCH_BYTES
    assert buffers.WIDENED_BYTES == 4 * PIECE_NUMEL


def test_formulas_import_no_torch() -> None:
    names = [
        f"formulas.{name}" for name in ["traffic", "memory", "activations", "buffers", "time", "offload", "recovery"]
    ]
    names += [f"answer.{name}" for name in ["estimate", "advice", "sweep", "redundancy", "zero_r"]]
    names += ["engine.step", "model.shape", "model.tensor"]
    imports = ", ".join(f"onecopy.planner.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
