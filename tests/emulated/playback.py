"""Playback: what a rehearsal asked of the device, played against durations: when everything would run, and what waits.

`device/rehearsal.h` writes down, in the order of the program, kernels, collectives, events and memory. From these
follows what each kernel and collective comes after, as on CUDA: the one before it on its stream, what its stream was
told to wait for, and the collective before it on its communicator. The host is taken to be ahead of the device always.

Collectives that run at the same time share the link: each of k goes at 1/k of its speed. Kernels slow nobody.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Asked(NamedTuple):
    """One entry of a rehearsal, see `device/rehearsal.h`."""

    what: str
    name: str
    agent: int
    other: int
    group: int
    nbytes: int
    ours: bool
    shapes: Sequence[Sequence[int]]


@dataclass
class Job:
    """A kernel, a collective or a mark, and when it ran.

    Attributes:
        stream: its stream; of a collective the communicator's.
        seconds: alone.
        after: places of the jobs that must have ended.
        shares_link: it is a collective.
        start, end: seconds since the beginning.
    """

    asked: Asked
    stream: int
    seconds: float
    after: list[int]
    shares_link: bool
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Span:
    """What happened between two marks.

    Attributes:
        seconds: from one to the other.
        computing: seconds of kernels of the model and the optimizer on the stream of the marks.
        copying: of the sharding's kernels there.
        messages: seconds that the collectives would take one after the other.
        peak: bytes of tensors at most, in the program's order, as a caching allocator counts.
    """

    seconds: float
    computing: float
    copying: float
    messages: float
    peak: int

    @property
    def exposed(self) -> float:
        """Seconds in which the stream had nothing to run."""
        return max(0.0, self.seconds - self.computing - self.copying)


@dataclass
class _Streams:
    """What the next job on each stream comes after."""

    next: dict[int, set[int]] = field(default_factory=dict)
    events: dict[int, set[int]] = field(default_factory=dict)

    def of(self, agent: int) -> set[int]:
        return self.next.setdefault(agent, set())


def jobs_of(asked: Sequence[Asked], duration: Callable[[Asked], float]) -> list[Job]:
    """The jobs of a rehearsal, in the order in which they were asked for.

    Args:
        duration: seconds of a kernel or collective that runs alone.
    """
    streams = _Streams()
    communicators: dict[int, int] = {}
    places: dict[int, int] = {}
    jobs: list[Job] = []
    for number, one in enumerate(asked):
        if one.what == "record":
            streams.events[one.other] = set(streams.of(one.agent))
        elif one.what == "wait":
            streams.of(one.agent).update(streams.events.get(one.other, ()))
        elif one.what == "wait for collective":
            # Of one that was asked for before the rehearsal was looked at nothing is known.
            if one.other in places:
                streams.of(one.agent).add(places[one.other])
        elif one.what in ("kernel", "collective", "mark"):
            after = set(streams.of(one.agent))
            is_collective = one.what == "collective"
            if is_collective:
                after |= streams.of(one.other)
                if one.group in communicators:
                    after.add(communicators[one.group])
                communicators[one.group] = len(jobs)
            places[number] = len(jobs)
            streams.next[one.agent] = {len(jobs)}
            seconds = 0.0 if one.what == "mark" else duration(one)
            jobs.append(Job(one, one.agent, seconds, sorted(after), is_collective))
    return jobs


def play(jobs: Sequence[Job]) -> None:
    """Set when each job starts and ends."""
    waiting = [len(job.after) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for place, job in enumerate(jobs):
        for earlier in job.after:
            followers[earlier].append(place)
    now = 0.0
    running: list[tuple[float, int]] = []  # kernels, by their ends
    sharing: dict[int, float] = {}  # collectives, and the seconds that each would still take alone
    ready = [place for place, count in enumerate(waiting) if not count]
    while ready or running or sharing:
        for place in ready:
            jobs[place].start = now
            if jobs[place].shares_link and jobs[place].seconds:
                sharing[place] = jobs[place].seconds
            else:
                heapq.heappush(running, (now + jobs[place].seconds, place))
        ended = []
        shortest = min(sharing, key=sharing.__getitem__, default=None)
        until = float("inf") if shortest is None else now + sharing[shortest] * len(sharing)
        if running and running[0][0] < until:
            until = running[0][0]
        elif shortest is not None:
            ended.append(shortest)
        passed = (until - now) / max(1, len(sharing))
        for place in ended:
            del sharing[place]
        for place in sharing:
            sharing[place] -= passed
        now = until
        while running and running[0][0] <= now:
            ended.append(heapq.heappop(running)[1])
        ready = []
        for place in ended:
            jobs[place].end = now
            for follower in followers[place]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)


def spans(asked: Sequence[Asked], duration: Callable[[Asked], float]) -> list[Span]:
    """What happened from each mark of a rehearsal to the next."""
    jobs = jobs_of(asked, duration)
    play(jobs)
    marks = [job for job in jobs if job.asked.what == "mark"]
    places = {id(job): place for place, job in enumerate(jobs)}
    peaks = _peaks(asked)
    found = []
    for begin, end, peak in zip(marks[:-1], marks[1:], peaks, strict=True):
        on_stream = [
            job
            for job in jobs
            if job.stream == begin.stream and not job.shares_link and begin.end <= job.start and job.end <= end.end
        ]
        between = jobs[places[id(begin)] : places[id(end)]]
        found.append(
            Span(
                end.end - begin.end,
                sum(job.seconds for job in on_stream if not job.asked.ours),
                sum(job.seconds for job in on_stream if job.asked.ours),
                sum(job.seconds for job in between if job.shares_link),
                peak,
            )
        )
    return found


def _peaks(asked: Sequence[Asked]) -> list[int]:
    """The most bytes held from each mark to the next."""
    held = 0
    peaks: list[int] = []
    for one in asked:
        if one.what == "allocate":
            held += one.nbytes
        elif one.what == "free":
            held -= one.nbytes
        elif one.what == "mark":
            peaks.append(held)
        if peaks:
            peaks[-1] = max(peaks[-1], held)
    return peaks[:-1]
