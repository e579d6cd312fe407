"""What torch's CPU allocator says: bytes of all tensors at their highest, whoever made them. The meter's exact witness.

torch keeps the count only while its profiler runs, and only of what was allocated meanwhile; so everything that is to
be counted is made inside.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

_MARK: Final = "the counted step"


def peak_of_last(make: Callable[[], Callable[[], T]]) -> tuple[int, T]:
    """The highest sum of tensors' bytes in a call, and what the call gave.

    Args:
        make: allocates what is to be counted, and returns the call.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = make()
        with record_function(_MARK):
            found = step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    [marked] = [event for event in events if event.get("name") == _MARK and event.get("cat") == "user_annotation"]
    first, last = marked["ts"], marked["ts"] + marked["dur"]
    sums = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and first <= event["ts"] <= last
    ]
    return max(sums), found
