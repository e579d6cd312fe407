"""Survival: mirror, two copies, checkpoints in memory and on disk beside each other, from few ranks to thousands.

What each costs in memory and traffic, and the share of a run's time that losses take with it. Times of a repair are
measured on small jobs (docs/recovery.md) and assumed for large ones; each assumption is a name in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onecopy.planner.answer.redundancy import DISK_BANDWIDTH, RESTART_SECONDS
from onecopy.planner.formulas.recovery import (
    best_interval,
    copies_elements,
    copies_memory,
    lost_seconds,
    lost_seconds_with_copies,
    mirror_elements,
    mirror_memory,
)

RANKS: Final = (8, 32, 128, 512, 1024, 4096)

REPAIR_SECONDS: Final = 0.3
"""From a loss to the next step on 4 gloo ranks of one host, beside the slices' own way. Measured: docs/recovery.md."""

MEETING_SECONDS: Final = 10.0
"""For process groups of a thousand ranks to be made anew. An assumption; it grows with the ranks, here in proportion
up to that number and no further."""

HOST_COPY_BANDWIDTH: Final = 1e10
"""Bytes a second at which a rank copies its slices to host memory. An assumption."""

DEVICE_HOURS: Final = 50_700.0
"""Device-hours for each loss: Llama 3's 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True)
class Way:
    """One way to survive losses, at one number of ranks.

    Attributes:
        name: "mirror", "2 copies", or checkpoints "in memory" or "on disk".
        memory: bytes more on each rank; in host memory for checkpoints in memory.
        traffic: bytes more that each rank sends in a step, on average.
        slower: share of a step by which that traffic lengthens it, if it hides behind nothing.
        lost: share of the time that is lost to losses, their repair, and saving.
        steps: that a loss throws away, on average.
    """

    name: str
    memory: float
    traffic: float
    slower: float
    lost: float
    steps: float

    @property
    def cost(self) -> float:
        """Share of the time, in all."""
        return self.slower + self.lost


def losses_a_day(ranks: int) -> float:
    """Expected of so many devices."""
    return ranks * 24 / DEVICE_HOURS


def ways(
    parameters: float,
    ranks: int,
    *,
    losses: float,
    step: float,
    bandwidth: float,
    gpus_a_node: int = 8,
    optimizer_bytes: float = 12,
    gradient_bytes: float = 2,
) -> list[Way]:
    """All of them, for a model of ``parameters`` over ``ranks`` at stage 3.

    Args:
        losses: a day.
        step: seconds.
        bandwidth: bytes a second between two ranks of different hosts.
    """
    day = 86_400.0
    held = optimizer_bytes * parameters / ranks
    meeting = REPAIR_SECONDS + MEETING_SECONDS * min(1.0, ranks / 1024)
    # A newcomer gets its own slices and those that it mirrors.
    repair = meeting + 2 * held / bandwidth
    lost = _share(lost_seconds_with_copies(losses, restart=repair, step=step), day)
    found = []
    for name, memory, elements in (
        (
            "mirror",
            mirror_memory(parameters, ranks, optimizer_bytes=optimizer_bytes),
            mirror_elements(parameters, ranks),
        ),
        (
            "2 copies",
            copies_memory(2, parameters, ranks, optimizer_bytes=optimizer_bytes),
            copies_elements(2, parameters, ranks),
        ),
    ):
        traffic = elements * gradient_bytes
        found.append(Way(name, memory, traffic, traffic / bandwidth / step, lost, 0.5))
    in_memory = held / HOST_COPY_BANDWIDTH
    on_disk = optimizer_bytes * parameters / (max(1, ranks / gpus_a_node) * DISK_BANDWIDTH)
    for name, save, restart in (
        ("in memory", in_memory, RESTART_SECONDS),
        ("on disk", on_disk, RESTART_SECONDS + on_disk),
    ):
        interval = max(step, best_interval(losses, day, save)) if losses else day
        lost = lost_seconds(losses, day, restart=restart, interval=interval, save_seconds=save)
        is_in_memory = name.endswith("memory")
        found.append(
            Way(
                name,
                # Its own, and its neighbour's: one that is whole while the next is written.
                4 * held if is_in_memory else 0.0,
                held * step / interval if is_in_memory else 0.0,
                held / interval / bandwidth if is_in_memory else 0.0,
                _share(lost, day),
                interval / step / 2,
            )
        )
    return found


def _share(seconds: float, of: float) -> float:
    return min(1.0, seconds / of)
