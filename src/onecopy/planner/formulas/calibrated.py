"""Calibrated: the constants that no formula gives, as fitted on real runs by `benchmarks/calibrate_planner.py`.

Half of the Ultra-Scale Playbook's runs with data parallelism alone or beside tensor parallelism within a node, on H100;
docs/planner.md gives the errors on the other half.
"""

from __future__ import annotations

from typing import Final

UTILISATION: Final = 0.378
"""Share of the peak that computing reaches at a hidden size of 2048 while no message is waited for. Fitted."""

GROWTH: Final = 0.274
"""How that share grows with the hidden size, see `utilisation`. Fitted."""

LINK_EFFICIENCY: Final = 0.491
"""Share of a link's data-sheet bandwidth that a collective reaches amid training. Fitted; in a benchmark of NCCL alone
it is 0.8 to 0.9."""

CROWDING: Final = 0.158
"""How much slower a collective gets with each doubling of the nodes that it spans. Fitted."""

LATENCY: Final = 2.3e-5
"""Seconds of one round of a ring, a layer a message. Fitted; NCCL alone takes about 6e-6."""

HIDDEN_SHARE: Final = 0.85
"""Share of computing behind which collectives hide. The playbook's runs hide next to nothing (0.02), for nanotron sends
after backward; onecopy sends during it, as FSDP does, whose runs (llm-foundry, H100) fit best from 0.7 to 1."""

LAUNCH: Final = 4.1e-4
"""Seconds that a block's forward and backward take at the least, however few tokens there are: the host launches its
kernels. Fitted."""

TENSOR_LAUNCH: Final = 4.6e-3
"""Likewise of a block that tensor-parallel ranks share, which wait for each other four times. Fitted."""

TENSOR_EFFICIENCY: Final = 1.0
"""Share of the data-sheet bandwidth within a node that messages of tensor parallelism reach. Fitted, 1 at most."""

TENSOR_LATENCY: Final = 1.3e-5
"""Seconds of a round of theirs. Fitted."""


def utilisation(hidden: int, base: float = UTILISATION, growth: float = GROWTH) -> float:
    """Share of the peak that computing reaches, more with wider layers: base · (hidden / 2048)^growth, 0.55 at most."""
    return float(min(0.55, base * (hidden / 2048) ** growth))


H100_BALANCE: Final = 989e12 / 3.35e12
"""Operations for each byte of memory traffic at which an H100's peak and memory are equally busy."""

BALANCE: Final = 0.5
"""How the share of the peak grows where memory is faster beside it, see `balance_factor`. An assumption between what
the pair H100 and A100 80 GB says (0.6) and the pair A100 80 GB and 40 GB (0.25)."""


def balance_factor(peak: float, memory_bandwidth: float) -> float:
    """By how much the share of the peak exceeds an H100's: (its operations a byte / this GPU's)^`BALANCE`, 1.5 at most.

    What is no matrix product waits for memory, so that a GPU with less peak beside as much bandwidth reaches more of
    it. It stands where no runs of a kind are published.

    Args:
        peak: operations a second.
        memory_bandwidth: bytes a second.
    """
    return float(min(1.5, (H100_BALANCE * memory_bandwidth / peak) ** BALANCE))
