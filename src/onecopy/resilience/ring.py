"""Ring: which rank holds what of which other one.

On one host each rank's holder is the rank before it. On several the ring goes from host to host, from each rank to the
one in the same place of the next host: so a host that is lost as a whole takes no slice along with its second holder.

    2 hosts of 2 ranks     rank 0, 1 | 2, 3     0 ◀─▶ 2     1 ◀─▶ 3
"""

from __future__ import annotations

import os

from onecopy.resilience.membership import membership


def stride(size: int) -> int:
    """Ranks between a rank and its holder, of ``size`` ranks in order of hosts."""
    if membership() is None:
        # Nobody replaces ranks, and hosts may have differently many.
        return 1
    on_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return on_a_host if size % on_a_host == 0 and on_a_host < size else 1


def holder(rank: int, size: int) -> int:
    """The rank that holds what ``rank`` has."""
    return (rank - stride(size)) % size


def held(rank: int, size: int) -> int:
    """The rank of which ``rank`` holds what it has."""
    return (rank + stride(size)) % size
