"""Chunks: how many tokens a loss takes at once. The planner counts with it, without torch."""

from __future__ import annotations

from typing import Final

CHUNKS: Final = 8
"""Into how many chunks tokens are cut, if these are then neither smaller nor larger than `ROWS`."""

ROWS: Final = (128, 1024)
"""Fewest and most tokens of a chunk: fewer are slow on a GPU, and more hold more."""


def chunk_rows(tokens: int) -> int:
    """Tokens of a chunk where ``tokens`` are all that there are."""
    return min(max(-(-tokens // CHUNKS), ROWS[0]), ROWS[1])
