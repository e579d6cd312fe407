"""The kernel as witness: bytes that leave each rank's network interface. Oracle: design.md's table; and the ledger.

The same measurement as benchmarks/wire.py, on a smaller model. It needs root, for network namespaces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import wire

# The benchmark is what is tested here; it is no part of the package.
from harness import namespaces
from trained.gpt import Shape

REASON = namespaces.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# The median of seven steps: on a busy machine TCP now and then sends a segment again.
WORK = wire.Work(Shape(layers=2, hidden=256, heads=4, vocabulary=512), batch=1, length=8, steps=7, limit=60.0)
PSI = wire.count_parameters(WORK.shape)
TWO_RANKS = [
    *(wire.Case(f"onecopy stage {stage}", "fp32", g) for stage in range(4) for g in (1, 4)),
    wire.Case("onecopy stage 3", "bf16", 1),
]
FOUR_RANKS = [wire.Case("onecopy stage 2", "fp32", 4)]
RUNS = [(2, case) for case in TWO_RANKS] + [(4, case) for case in FOUR_RANKS]


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, wire.Case], wire.Measured]:
    before = _held()
    found = [wire.measure(TWO_RANKS, 2, WORK), wire.measure(FOUR_RANKS, 4, WORK)]
    assert _held() == before, "network namespaces are left behind"
    return dict(zip(RUNS, [one for run in found for one in run], strict=True))


@pytest.mark.parametrize(
    "ranks, case", RUNS, ids=[f"{c.system}-{c.precision}-g{c.micro_batches}-N{n}" for n, c in RUNS]
)
def test_each_rank_sends_what_the_paper_says(
    ranks: int, case: wire.Case, measured: dict[tuple[int, wire.Case], wire.Measured]
) -> None:
    stage, g = int(case.system.removeprefix("onecopy stage ")), case.micro_batches
    elements = [2 * PSI, 2 * PSI, (g + 1) * PSI, 3 * g * PSI][stage] * (ranks - 1) / ranks
    expected = elements * {"fp32": 4, "bf16": 2}[case.precision]
    one = measured[ranks, case]
    assert one.ledger is not None
    assert one.sent == pytest.approx([expected] * ranks, rel=0.02)
    assert one.ledger == pytest.approx([expected] * ranks, rel=0.02)
    # The kernel sees headers and control messages on top.
    assert all(sent >= booked for sent, booked in zip(one.sent, one.ledger, strict=True))


def test_a_rank_that_fails_is_named_and_leaves_no_network() -> None:
    before = _held()
    with pytest.raises(Exception, match=r"(?s)Process \d.*KeyError: 'no such system'"):
        wire.measure([wire.Case("no such system", "fp32", 1)], 2, WORK)
    assert _held() == before


def test_ranks_that_take_too_long_are_ended_by_name() -> None:
    before = _held()
    hurried = wire.Work(WORK.shape, batch=1, length=8, steps=10**6, limit=1.0)
    with pytest.raises(
        wire.RanksError, match=r"expected 2 ranks to end within 1 s, found 0 of 1 cases done: .*stage 3"
    ):
        wire.measure([wire.Case("onecopy stage 3", "fp32", 1)], 2, hurried, rate="100mbit")
    assert _held() == before


def test_a_rate_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="such as 100mbit; found 'fast'"):
        namespaces.Network(2, rate="fast")


def _held() -> list[str]:
    """What could keep a namespace alive: the one this process is in, those it holds open, and its children.

    Other namespaces of the machine are not compared, since other tests may run beside this one.
    """
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    # The descriptor by which the folder itself was read is closed by now.
    held = [os.readlink(path) for path in ["/proc/self/ns/net", *descriptors] if os.path.lexists(path)]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [name for name in held if name.startswith("net:")] + children
