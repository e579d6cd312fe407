"""The planner's formulas against the numbers that the ZeRO paper prints (arXiv 1910.02054)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onecopy.errors import SettingsError
from onecopy.planner.memory import largest_model, model_state_bytes
from onecopy.planner.traffic import step_elements

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
    [(1, 2, 7.6, 14.4, 128), (2, 4, 15.2, 28.8, 256), (4, 8, 30.4, 57.6, 512), (8, 16, 60.8, 115.2, 1024)],
)
def test_table_2_bounds(model_parallel: int, none: float, first: float, second: float, third: float) -> None:
    for stage, billions in enumerate((none, first, second, third)):
        found = largest_model(stage, 32e9, 64, model_parallel=model_parallel) / 1e9
        assert found == pytest.approx(billions, rel=0.01)


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


def test_formulas_import_no_torch() -> None:
    code = "import sys, onecopy.planner.traffic, onecopy.planner.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
