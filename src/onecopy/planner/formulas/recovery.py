"""Recovery: what a lost rank takes with it, what copies cost, and the time that failures cost with and without them.

Sources: FlashRecovery (arXiv 2509.03047) for times, Gemini (SOSP 2023) for survival odds; K bytes of optimizer states a
parameter as in ZeRO.
"""

from __future__ import annotations

from math import comb, sqrt

from onecopy.stage import Stage


def unique_bytes(
    stage: int, parameters: float, shard: int, *, optimizer_bytes: float = 12, from_master: bool = False
) -> float:
    """Bytes that exist on one rank alone: none at stage 0, KΨ/N at stages 1 and 2, (K+2)Ψ/N at stage 3.

    Args:
        from_master: 16-bit parameters are cast from the fp32 master, as onecopy does: KΨ/N at stage 3 too.
    """
    kind = Stage.of(stage)
    own = kind.shards_parameters and not from_master
    each = (optimizer_bytes if kind.shards_optimizer else 0) + (2 if own else 0)
    return each * parameters / shard


def copies_memory(copies: int, parameters: float, shard: int, *, optimizer_bytes: float = 12) -> float:
    """Bytes that a rank holds more when each slice of the optimizer's states exists r times: (r-1)KΨ/N."""
    return (copies - 1) * optimizer_bytes * parameters / shard


def copies_elements(copies: int, parameters: float, shard: int) -> float:
    """Elements a rank sends more in a step to keep copies fresh by computing the update on each: 2(r-1)Ψ/N."""
    return 2.0 * (copies - 1) * parameters / shard


def survival(ranks: int, copies: int, lost: int) -> float:
    """At least how likely every slice survives the loss of ``lost`` ranks at once (Gemini).

    1 while fewer are lost than there are copies, else 1 - (N/m)·C(N-m, k-m)/C(N, k) for m copies and k lost.
    """
    if lost < copies:
        return 1.0
    if lost > ranks:
        return 0.0
    return max(0.0, 1 - ranks / copies * comb(ranks - copies, lost - copies) / comb(ranks, lost))


def best_interval(failures: float, duration: float, save_seconds: float) -> float:
    """Seconds between checkpoints that lose the least time: √(2·d·k0/m) (FlashRecovery).

    Args:
        failures: m, in all.
        duration: d, seconds of training.
        save_seconds: k0, what a checkpoint stops training for.
    """
    return sqrt(2 * duration * save_seconds / failures)


def lost_seconds(failures: float, duration: float, *, restart: float, interval: float, save_seconds: float) -> float:
    """Seconds that failures cost with checkpoints every ``interval``: m(s0 + t/2) + (d/t)k0 (FlashRecovery)."""
    return failures * (restart + interval / 2) + duration / interval * save_seconds


def lost_seconds_with_copies(failures: float, *, restart: float, step: float) -> float:
    """Seconds that failures cost where a copy survives: the restart and at most one step each; nothing is saved."""
    return failures * (restart + step)


def expected_failures(devices: int, seconds: float, hours_per_failure: float = 50_700.0) -> float:
    """Failures in a run, at one in so many device-hours (Llama 3: 419 in 54 days on 16,384 GPUs)."""
    return devices * seconds / 3600 / hours_per_failure


def mirror_memory(parameters: float, shard: int, *, optimizer_bytes: float = 12) -> float:
    """Bytes that a rank holds more for the mirror of one neighbour's slices: KΨ/N, as two copies would."""
    return copies_memory(2, parameters, shard, optimizer_bytes=optimizer_bytes)


def mirror_elements(parameters: float, shard: int) -> float:
    """Elements a rank sends more in a step for its mirror: its final gradients, Ψ/N."""
    return parameters / shard
