"""Buffers: what a rank holds beside model states and activations: windows, staging, temporaries, the driver's share.

The engine's own (gathered window, gradients on their way, staging) follow from its schedule, see `step.py`; here are
those that have closed forms.
"""

from __future__ import annotations

from typing import Final

CUDA_CONTEXT_BYTES: Final = 600e6
"""What driver, kernels and the communication library take of a GPU before any tensor. An assumption, not measured."""

ALLOCATOR_SLACK: Final = 0.06
"""Share of live bytes that a caching allocator holds beyond them: rounding and fragments. An assumption, within ZeRO's
Table 2, where 18 % (stage 1) to 38 % (no sharding) of the bound were lost to everything that is not model states."""

WIDENED_BYTES: Final = 4 * 2**20
"""Bytes of a narrow gradient's elements that the optimizer's step widens at a time (`onecopy.sharding.narrow`)."""

STAGING_BYTES: Final = 4 * 2**20
"""Most bytes of one staging buffer of the gloo transport (`onecopy.memory.staging`)."""


def with_overheads(live: float) -> float:
    """Bytes that a process takes of a GPU when ``live`` bytes of tensors are alive."""
    return live * (1 + ALLOCATOR_SLACK) + CUDA_CONTEXT_BYTES


def fused_buffer_bytes(parameters: float) -> float:
    """Bytes of one fp32 buffer for all gradients: 4 a parameter, 12 GB for 3B (ZeRO §3.2). C_B saves them."""
    return 4.0 * parameters


def pinned_bytes(nbytes: float) -> float:
    """Bytes of page-locked host memory that torch really takes: its allocator rounds up to a power of two."""
    size = 1
    while size < nbytes:
        size *= 2
    return float(size) if nbytes > 0 else 0.0


def optimizer_temporary_bytes(
    slice_numel: float, implementation: str, *, master_bytes: float = 4, gradient_bytes: float = 4
) -> float:
    """Bytes that an AdamW step allocates on top.

    Args:
        slice_numel: elements that this rank updates.
        implementation: torch's "foreach" takes the square root of all second moments at once, one more copy of the
            slices; "fused" none; "for-loop" one parameter at a time, which is not counted.
        gradient_bytes: where less than ``master_bytes``, gradients are widened a piece at a time, before the root.
    """
    root = master_bytes * slice_numel if implementation == "foreach" else 0.0
    piece = min(WIDENED_BYTES, master_bytes * slice_numel) if gradient_bytes < master_bytes else 0.0
    return max(root, piece)


def staging_bytes(largest_bucket: int, shard: int, wire_bytes: float, limit: float = STAGING_BYTES) -> float:
    """Bytes of the gloo transport's staging buffers: what N - 1 peers send of one slice, up to a constant (ZeRO C_B).

    There are two, for the reduces of two units are under way at a time.
    """
    return 2 * min(limit, wire_bytes * largest_bucket * (shard - 1) / shard)
