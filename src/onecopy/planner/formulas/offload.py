"""Offload: traffic and efficiency of keeping model states outside of the device (ZeRO-Offload, ZeRO-Infinity)."""

from __future__ import annotations


def offload_bytes(parameters: float, shard: int = 1) -> float:
    """Bytes that cross the host link in a step when the optimizer is on the CPU: 4Ψ/N at least.

    Source: ZeRO-Offload: 2Ψ of gradients go down, 2Ψ of updated parameters come up; ranks share the work.
    """
    return 4.0 * parameters / shard


def intensity_of_parameters(micro_batch: int, sequence: int) -> float:
    """Operations for each byte of parameters or gradients moved: s·b (ZeRO-Infinity)."""
    return float(sequence * micro_batch)


def intensity_of_optimizer(micro_batch: int, sequence: int) -> float:
    """Operations for each byte of optimizer states moved: s·b/4 (ZeRO-Infinity)."""
    return sequence * micro_batch / 4


def intensity_of_checkpoints(hidden: int, layers_per_checkpoint: int = 1) -> float:
    """Operations for each byte of activation checkpoints moved: 24·h·ci (ZeRO-Infinity)."""
    return 24.0 * hidden * layers_per_checkpoint


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Share of time spent computing when nothing overlaps: ait·bw / (ait·bw + peak) (ZeRO-Infinity).

    Args:
        intensity: operations for each byte moved.
        bandwidth: bytes a second.
        peak: operations a second that the device reaches.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(target: float, intensity: float, peak: float) -> float:
    """Bytes a second at which ``efficiency`` reaches ``target``; its inverse."""
    return target / (1 - target) * peak / intensity


def cpu_step_seconds(elements: float, memory_bandwidth: float, bytes_moved: float = 28.0) -> float:
    """Seconds of Adam over ``elements`` on the CPU, which host memory limits.

    Args:
        memory_bandwidth: bytes a second of the host memory for this rank.
        bytes_moved: for each element; reading parameter, gradient and two moments and writing three of them is 28.
    """
    return elements * bytes_moved / memory_bandwidth
