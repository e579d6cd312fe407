"""Strides: in which order the elements of a dense tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dimensions from the slowest to the fastest in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
