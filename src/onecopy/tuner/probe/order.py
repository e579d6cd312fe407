"""Order and report: what a host process is told to try, and what each of its ranks left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from onecopy.tuner.candidate import Candidate

Phase = Literal["build", "load", "batch", "forward", "backward", "step"]

PHASES: tuple[Phase, ...] = ("build", "load", "batch", "forward", "backward", "step")
"""The model is built; it is sharded, and its optimizer made; a batch is made; then the phases of each step."""

Ended = Literal["itself", "silence", "time", "peers"]
"""What ended a rank: itself; no sign of life; the probe's time; or that another rank had ended badly."""


@dataclass(frozen=True)
class Limits:
    """What a probe may take.

    Attributes:
        memory: bytes of one rank; None for as many as there are.
        silence: seconds without a sign of life of any rank, after which the probe hangs.
        seconds: in all.
        control_group: a directory of the system's memory control groups in which probes may make theirs; "" limits by
            RLIMIT_DATA instead.
    """

    memory: int | None = None
    silence: float = 60.0
    seconds: float = 300.0
    control_group: str = ""


@dataclass(frozen=True)
class Length:
    """How long a probe measures.

    Attributes:
        seconds: of timed steps, after which it ends.
        least, most: steps that it takes all the same, and at the most.
        give_up_over: seconds of a step; a setting whose first timed steps both take longer is not measured further.
    """

    seconds: float = 3.0
    least: int = 4
    most: int = 20
    give_up_over: float | None = None


@dataclass(frozen=True)
class Order:
    """One probe, as one host process sees it.

    Attributes:
        ranks: those that it is to start.
        local_ranks: their numbers on this host.
        size: all ranks of the probe.
        meeting: where ranks find each other, as `torch.distributed.init_process_group` takes it.
        device: "cpu", "cuda", ...
        threads: of each rank.
    """

    candidate: Candidate
    ranks: Sequence[int]
    local_ranks: Sequence[int]
    size: int
    meeting: str
    device: str
    threads: int
    length: Length = Length()
    limits: Limits = Limits()


@dataclass
class Report:
    """What one rank left.

    Attributes:
        phase: the last one that it entered; None if it never began.
        step: the step in which that was, from 0.
        code: its exit code, or the negative number of the signal that ended it.
        ended: what ended it.
        steps: seconds of each whole step.
        base: bytes that the process held before the model was built.
        peak: the most that it held, as the kernel counted; on an accelerator its allocator.
        metered: bytes by the meter's categories at the highest moment.
        off_device: bytes by category in host memory or files.
        error: what it raised, in a line; the traceback below it.
        memory: whether it raised that for want of memory, or the system ended it for that.
        asked: bytes of the allocation that failed.
        at: seconds after the start when it failed.
        gave_up: whether it was too slow to be measured further.
    """

    rank: int
    phase: Phase | None = None
    step: int = 0
    code: int = 0
    ended: Ended = "itself"
    steps: list[float] = field(default_factory=list)
    base: int = 0
    peak: int = 0
    metered: dict[str, int] = field(default_factory=dict)
    off_device: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    traceback: str = ""
    memory: bool = False
    asked: int | None = None
    at: float = 0.0
    gave_up: bool = False
