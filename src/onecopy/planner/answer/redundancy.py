"""Redundancy: what copies of slices cost in memory and traffic, against the time that failures cost without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import Estimate, Job, local_units
from onecopy.planner.formulas.recovery import (
    best_interval,
    copies_elements,
    copies_memory,
    expected_failures,
    lost_seconds,
    lost_seconds_with_copies,
    survival,
    unique_bytes,
)
from onecopy.planner.machine.machine import Machine

RESTART_SECONDS: Final = 150.0
"""Seconds until training goes on after a failure: FlashRecovery's at 4,800 devices."""

DISK_BANDWIDTH: Final = 3e9
"""Bytes a second at which a host saves a checkpoint. An assumption."""


@dataclass(frozen=True)
class Redundancy:
    """Copies beside checkpoints, for a run of so many days.

    Attributes:
        unique: bytes that a failure of one rank loses without copies.
        memory: bytes more on each rank.
        traffic: bytes more that each rank sends in a step.
        failures: expected in the run.
        survival: for 1, 2 and 4 ranks lost at once, how likely every slice is left.
        checkpoint_every: seconds between checkpoints that lose the least time.
        lost_without, lost_with: seconds lost in the run.
    """

    copies: int
    days: float
    unique: float
    memory: float
    traffic: float
    failures: float
    survival: dict[int, float]
    checkpoint_every: float
    lost_without: float
    lost_with: float


def redundancy(job: Job, machine: Machine, found: Estimate, copies: int, days: float = 30.0) -> Redundancy:
    """What ``copies`` of each slice cost and save beside the plan ``found``.

    Raises:
        SettingsError: if there are fewer than one or more copies than ranks.
    """
    option = found.option
    if not 1 <= copies <= option.shard:
        raise SettingsError(f"copies must be between 1 and the {option.shard} ranks that share slices; found {copies}")
    parameters, widths = float(sum(unit.parameters for unit in local_units(job, option))), job.widths
    own = 3 * widths.master
    duration = days * 86_400
    failures = expected_failures(machine.gpus, duration)
    held = own * job.shape.parameters / machine.nodes
    save = held / DISK_BANDWIDTH
    interval = best_interval(failures, duration, save)
    return Redundancy(
        copies,
        days,
        unique_bytes(option.stage, parameters, option.shard, optimizer_bytes=own, from_master=True),
        copies_memory(copies, parameters, option.shard, optimizer_bytes=own),
        copies_elements(copies, parameters, option.shard) * widths.reduce,
        failures,
        {lost: survival(option.shard, copies, lost) for lost in (1, 2, 4) if lost <= option.shard},
        interval,
        lost_seconds(failures, duration, restart=RESTART_SECONDS, interval=interval, save_seconds=save),
        lost_seconds_with_copies(failures, restart=RESTART_SECONDS, step=found.seconds.total),
    )
