"""Covering: of a product of three and more axes, the cases in which every two values of any two axes meet.

Faults that need three particular values at once are rare; those of two are all met. The rest of each product is marked
`full` and is run by `pytest -m full`. A test that is asked for by its name runs all of its cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, object]
"""For each axis its value."""


def cover(cases: Sequence[Case]) -> set[int]:
    """Positions of cases that together hold every pair of values that the cases hold; greedily few of them."""
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    missing = set[object]().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda position: len(pairs[position] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def covered(cases: Sequence[Sequence[object]]) -> list[Any]:
    """The cases as `pytest.param`s of one argument, those that are not in the cover marked."""
    chosen = cover([{str(axis): repr(value) for axis, value in enumerate(case)} for case in cases])
    return [
        pytest.param(case, id="-".join(map(str, case)), marks=[] if position in chosen else pytest.mark.full)
        for position, case in enumerate(cases)
    ]


def mark_rest(items: Sequence[pytest.Item]) -> None:
    """Mark as `full` what does not belong to the cover of its test's cases, unless the test has chosen itself."""
    tests: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for group in tests.values():
        if len(group[0].callspec.params) < 3 or any(item.get_closest_marker("full") for item in group):
            continue
        chosen = cover([{name: repr(value) for name, value in item.callspec.params.items()} for item in group])
        for position, item in enumerate(group):
            if position not in chosen:
                item.add_marker(pytest.mark.full)
