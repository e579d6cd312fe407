"""Buffers: what a rank holds beside model states and activations: windows, staging, temporaries, the driver's share.

The engine's own (gathered window, gradients on their way, staging) follow from its schedule, see `step.py`; here are
those that have closed forms.
"""

from __future__ import annotations

from typing import Final

CUDA_CONTEXT_BYTES: Final = 600e6
"""What driver, kernels and the communication library take of a GPU before any tensor. An assumption, not measured."""

ALLOCATOR_SLACK: Final = 0.02
"""Share of live bytes that a caching allocator holds beyond them where memory is short: rounding and fragments. The
largest with which every run of MosaicML's table on A100s of 40 GB, all of which ran, is said to fit."""

WIDENED_BYTES: Final = 4 * 2**20
"""Bytes of a narrow gradient's elements that the optimizer's step widens at a time (`sharding/tensor/narrow.py`)."""

STAGING_BYTES: Final = {"cpu": 4 * 2**20, "accelerator": 2 * 2**30}
"""Most bytes of one communication buffer where nothing is said (`onecopy.memory.staging`); there are two."""

PREFETCH_BYTES: Final = 512 * 2**20
"""Bytes of units gathered ahead on an accelerator, where nothing is said (`onecopy.sharding.engine.order`)."""


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


def staging_limit(*, native: bool) -> float:
    """Most bytes of two communication buffers, on an accelerator (``native``) or the CPU."""
    return 2.0 * STAGING_BYTES["accelerator" if native else "cpu"]


def staging_bytes(
    numel: int, over: int, wire_bytes: float, *, native: bool, all_reduces: bool = False, casts: bool = True
) -> float:
    """Bytes of two communication buffers that would take a whole bucket (ZeRO C_B bounds them: `staging_limit`).

    Args:
        numel: elements of the bucket.
        over: ranks over which it is reduced.
        wire_bytes: of an element as it travels.
        native: the backend's own calls sum by themselves; of messages N - 1 come for N slices that are sent.
        all_reduces: it stays whole.
        casts: sums are kept in another dtype, for which a native reduce-scatter needs one more slice.
    """
    rows = (1 + casts * (not all_reduces) / over) if native else 2 - 1 / over
    return 2 * rows * wire_bytes * numel
