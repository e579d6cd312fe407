"""Rows: events that overlap in time go to different rows, so that each can be seen."""

from __future__ import annotations

from collections.abc import Sequence

from onecopy.report.run import Event


def assign_rows(events: Sequence[Event]) -> list[int]:
    """The row of each event, the lowest that is free at its start.

    Args:
        events: of one lane, in order of their starts.
    """
    ends: list[float] = []
    rows = []
    for event in events:
        row = next((row for row, end in enumerate(ends) if end <= event.start), len(ends))
        if row == len(ends):
            ends.append(event.end)
        ends[row] = event.end
        rows.append(row)
    return rows
