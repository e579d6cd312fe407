"""Perfetto: traces of ranks in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

A process is a rank, a thread is a lane. Where events of a lane overlap it gets more threads, since the format wants
those of one thread nested. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onecopy.report.rows import assign_rows
from onecopy.report.run import LANES, Trace


def perfetto_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """The document, to be written as JSON."""
    return {"displayTimeUnit": "ms", "traceEvents": [event for trace in traces for event in _events(trace)]}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    rank = trace.rank
    yield _name("process_name", rank, 0, name=f"rank {rank}, step {trace.step}")
    yield _name("process_sort_index", rank, 0, sort_index=rank)
    thread = 0
    for lane in LANES:
        events = [event for event in trace.events if event.lane == lane]
        rows = assign_rows(events)
        for row in range(max(rows, default=-1) + 1):
            yield _name("thread_name", rank, thread + row, name=f"{lane} {row + 1}" if row else lane)
            yield _name("thread_sort_index", rank, thread + row, sort_index=thread + row)
        for event, row in zip(events, rows, strict=True):
            yield {
                "ph": "X",
                "name": event.name,
                "cat": f"{lane},{event.phase}",
                "pid": rank,
                "tid": thread + row,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"lane": lane, "phase": event.phase, "unit": event.unit, "bytes": event.bytes},
            }
        thread += max(rows, default=-1) + 1
    for time, sizes in trace.memory:
        yield {"ph": "C", "name": "memory (bytes)", "pid": rank, "tid": 0, "ts": time * 1e6, "args": sizes}


def _name(what: str, rank: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}
